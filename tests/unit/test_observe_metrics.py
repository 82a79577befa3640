"""metrics.jsonl: one line a step, whatever else writes to it, and whatever wandb does."""

import json
import logging
import sys
import types

import pytest

from megatron_stream.config import ObserveConfig
from megatron_stream.observe.metrics import Metrics, read_metrics

pytestmark = pytest.mark.unit

DISABLED = ObserveConfig(wandb_mode="disabled")


def test_each_step_is_one_line_with_its_time(tmp_path):
    metrics = Metrics(tmp_path, DISABLED)
    metrics.log(1, reward=0.25, lag_max=2)
    with (tmp_path / "metrics.jsonl").open("a") as other:  # the supervisor's line
        other.write('{"memory_gib": 3.5, "time": 1.0}\n')
    metrics.log(2, reward=0.5)
    metrics.close()
    first, memory, second = read_metrics(tmp_path)
    assert (first["step"], first["reward"], first["lag_max"]) == (1, 0.25, 2)
    assert memory["memory_gib"] == 3.5
    assert second["step"] == 2 and second["time"] >= first["time"] > 1e9


def test_the_file_is_strict_json_also_for_nan_and_scalars_of_numpy(tmp_path):
    import numpy as np

    metrics = Metrics(tmp_path, DISABLED)
    metrics.log(1, grad_norm=float("nan"), loss=float("-inf"), lr=np.float32(0.5), clipped=True, note="x")
    metrics.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["grad_norm"], line["loss"], line["lr"], line["clipped"], line["note"]) == (None, None, 0.5, True, "x")


def test_an_unfinished_line_is_left_out_and_spoils_no_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(tmp_path) == [{"step": 1}]
    metrics = Metrics(tmp_path, DISABLED)
    metrics.log(2, reward=1.0)
    metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


def test_disabled_does_not_import_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    metrics = Metrics(tmp_path, DISABLED)
    assert metrics._wandb is None
    metrics.close()


def fake_wandb(monkeypatch, log):
    calls = types.SimpleNamespace(init=[], finished=0)

    def init(**kwargs):
        calls.init.append(kwargs)
        return types.SimpleNamespace(log=log, finish=lambda: setattr(calls, "finished", calls.finished + 1))

    module = types.SimpleNamespace(init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_the_values(tmp_path, monkeypatch):
    logged = []
    calls = fake_wandb(monkeypatch, lambda values, step: logged.append((step, values)))
    metrics = Metrics(tmp_path, ObserveConfig(wandb_project="p"))
    metrics.log(3, reward=0.5)
    metrics.close()
    (init,) = calls.init
    assert (init["project"], init["mode"], init["dir"]) == ("p", "offline", tmp_path)
    assert logged == [(3, {"reward": 0.5})] and calls.finished == 1


def test_wandb_failing_is_one_warning_and_no_lost_line(tmp_path, monkeypatch, caplog):
    def log(values, step):
        raise ConnectionError("gone")

    fake_wandb(monkeypatch, log)
    metrics = Metrics(tmp_path, ObserveConfig())
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            metrics.log(step, reward=0.0)
    metrics.close()
    assert len([r for r in caplog.records if "wandb" in r.message]) == 1
    assert len(read_metrics(tmp_path)) == 3


def test_without_wandb_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    metrics = Metrics(tmp_path, ObserveConfig())
    metrics.log(1, reward=1.0)
    metrics.close()
    assert len(read_metrics(tmp_path)) == 1
    assert "wandb did not start" in caplog.text
