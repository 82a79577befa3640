"""The timeline picture: which update it shows, and that it survives what a run may leave behind."""

import pytest
from matplotlib.image import imread

from megatron_stream.observe.timeline import choose_update, draw_timeline, version_colour
from tests.unit.fake_run import EARLY_S, STEP_S, T0, commit_time, run

pytestmark = pytest.mark.unit


def test_default_is_a_committed_version_of_the_middle_of_the_run():
    update = choose_update(run(5))
    assert update is not None
    assert (update.first, update.last) == (3, 3)
    begin = T0 + 0.5 + 2 * STEP_S
    assert begin - 0.1 < update.start < begin  # from the step's first forward
    assert commit_time(begin) + 0.5 < update.end < commit_time(begin) + 0.6  # to half a second after the commit


def test_a_skipped_version_is_never_chosen():
    events = [e for e in run(5) if not (e["name"] == "commit" and e["args"]["version"] == 3)]
    update = choose_update(events)
    assert update is not None and update.first != 3
    assert choose_update(events, version=3) is None


def test_two_consecutive_updates():
    update = choose_update(run(5), version=2, updates=2)
    assert update is not None
    assert (update.first, update.last) == (2, 3)
    assert update.end - update.start > STEP_S
    last = choose_update(run(5), version=5, updates=2)
    assert last is not None and (last.first, last.last) == (5, 5)  # there is no further one


@pytest.mark.parametrize("updates", [1, 2])
def test_draws_a_png_of_150_dpi(tmp_path, updates):
    path = tmp_path / "timeline.png"
    assert draw_timeline(run(4), path, updates=updates)
    assert imread(path).shape[1] == 14 * 150


def test_says_how_early_the_last_stage_sends(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    texts: list[str] = []
    annotate = Axes.annotate
    monkeypatch.setattr(
        Axes, "annotate", lambda self, text, *a, **k: texts.append(text) or annotate(self, text, *a, **k)
    )
    draw_timeline(run(3), tmp_path / "timeline.png")
    assert any(f"stage 1 starts sending {1000 * EARLY_S:.0f} ms before" in text for text in texts)


def test_nothing_committed_draws_nothing(tmp_path):
    path = tmp_path / "timeline.png"
    assert not draw_timeline([], path)
    assert not draw_timeline([e for e in run(2) if e["name"] != "commit"], path)
    assert not path.exists()


@pytest.mark.parametrize("missing", ["send", "arrive", "backward", "tokens", "sampled", "step ready"])
def test_missing_events_do_not_matter(tmp_path, missing):
    assert draw_timeline([e for e in run(2) if e["name"] != missing], tmp_path / "timeline.png")


def test_consecutive_versions_have_different_colours():
    assert all(version_colour(v) != version_colour(v + 1) for v in range(10))
