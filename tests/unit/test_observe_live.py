"""The live view: what it prints without a terminal, what it has on one, and that it reads only what is new."""

import io
import json

import pytest
from rich.console import Console

from megatron_stream.config import RunConfig
from megatron_stream.observe import live
from megatron_stream.observe.live import LiveView, Tail, last_line, sparkline
from megatron_stream.observe.live_state import RunState
from tests.unit.fake_run import EXPOSED_S, STALL_S, TOKEN_S, event, run

pytestmark = pytest.mark.unit


def config(steps: int = 3) -> RunConfig:
    made = RunConfig(dir="unused")
    made.trainer.steps = steps
    return made


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def metrics_line(step: int) -> dict:
    return {"step": step, "time": 0.0, "reward": 0.25, "version": step, "lag_mean": 0.8, "lag_max": 2, "step_s": 21.34}


def test_one_plain_line_per_finished_step(tmp_path, capsys):
    view = LiveView(tmp_path, config())
    with view:
        view.refresh()
        assert capsys.readouterr().out == ""
        write(tmp_path / "events" / "all.jsonl", run(steps=2))
        write(tmp_path / "metrics.jsonl", [metrics_line(1), {"memory_gib": 1.0, "time": 0.0}, metrics_line(2)])
        view.refresh()
        first, second = capsys.readouterr().out.splitlines()
        assert first == (
            "step 1/3 reward 0.25 tokens/s 66 version 1 committed 2 lag 0.8 longest gap 170 ms "
            f"exposed {1000 * EXPOSED_S:.0f} ms step 21.3 s"
        )
        assert second.startswith("step 2/3")
        view.refresh()
    assert capsys.readouterr().out == ""


def test_a_line_waits_one_refresh_for_the_other_stages(tmp_path, capsys):
    events = run(steps=1)
    late = [e for e in events if e["track"] == "trainer stage 0" and e["name"] == "step ready"]
    view = LiveView(tmp_path, config())
    with view:
        write(tmp_path / "events" / "all.jsonl", [e for e in events if e not in late])
        write(tmp_path / "metrics.jsonl", [metrics_line(1)])
        view.refresh()
        assert capsys.readouterr().out == ""
        write(tmp_path / "events" / "all.jsonl", late)
        view.refresh()
        assert f"exposed {1000 * EXPOSED_S:.0f} ms" in capsys.readouterr().out
        write(tmp_path / "metrics.jsonl", [metrics_line(2)])
    assert "step 2/3" in capsys.readouterr().out  # no event of it ever came: it is printed at the end
    assert view._held == []


def test_a_part_that_changes_state_is_one_line(tmp_path, capsys):
    states = {"engine": "running"}
    view = LiveView(tmp_path, config())
    with view:
        view.parts = lambda: states
        view.refresh()
        view.refresh()
        states = {"engine": "running", "trainer": "running"}
        view.refresh()
        states = {"engine": "ended (1)", "trainer": "running"}
        view.refresh()
    assert capsys.readouterr().out.splitlines() == ["engine: running", "trainer: running", "engine: ended (1)"]


def test_a_resumed_run_does_not_print_its_past(tmp_path, capsys):
    write(tmp_path / "metrics.jsonl", [metrics_line(1)])
    view = LiveView(tmp_path, config())
    with view:
        write(tmp_path / "metrics.jsonl", [metrics_line(2)])
        view.refresh()
        view.refresh()
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["step 2/3"]


def test_the_panel_has_every_number(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(live.sys, "stdout", screen)
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(live, "Console", lambda: Console(file=screen, force_terminal=True, width=100, height=40))
    write(tmp_path / "events" / "all.jsonl", run(steps=2))
    write(tmp_path / "metrics.jsonl", [metrics_line(1), metrics_line(2), {"memory_gib": 7.5, "time": 0.0}])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text("loading\n[INFO] weights are [b]here[/b]\n\n")
    view = LiveView(tmp_path / "", config())
    with view:
        view.parts = lambda: {"engine": "running", "trainer": "ended (1)"}
        view.refresh()
    shown = screen.getvalue()
    for text in (
        "2/3",
        "0.250",
        "committed 2, trained 2",
        "mean 0.8, max 2",
        "120 ms",
        "7.5 GiB",
        "ended (1)",
        "66",
        "engine log",
        "[INFO] weights are [b]here[/b]",
    ):
        assert text in shown, text
    gap, usual = 1000 * (2 * TOKEN_S + STALL_S), 1000 * 2 * TOKEN_S
    assert f"{gap:.0f} ms around the last update, usually {usual:.0f} ms" in shown


def test_an_empty_folder_is_shown_too(tmp_path, monkeypatch):
    monkeypatch.setattr(live.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(live, "Console", lambda: Console(file=io.StringIO(), force_terminal=True))
    with LiveView(tmp_path / "not-there", config()) as view:
        view.refresh()


def test_tail_reads_only_what_is_new_and_whole(tmp_path):
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('2}\nbroken\n{"a": 3}\n')
    assert tail.read() == [{"a": 2}, {"a": 3}]


def test_the_state_stays_small_however_long_the_run():
    state = RunState(stages=2)
    for i in range(20_000):
        state.add_event(event("engine", "tokens", 0.01 * i, requests=[f"{i // 3}"], version=0))
    assert len(state._gaps) <= 4000 and len(state._last_token) <= 4000 and len(state._tokens) <= 3002
    for version in range(100):
        for e in run(steps=1):
            if "version" in e["args"] and e["track"] != "engine":
                state.add_event({**e, "args": {**e["args"], "version": version}})
    assert len(state._ready) <= 16 and len(state._backward_end) <= 17


def test_last_line_of_a_long_log_reads_its_end_only(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("")
    assert last_line(log) == ""
    log.write_text("x\n" * 100_000 + "the end\n \n")
    assert last_line(log) == "the end"


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
