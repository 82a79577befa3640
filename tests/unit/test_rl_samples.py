"""The sample stream: order, staleness, rewind, and kills of every party at every point."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from megatron_stream.rl.samples import Counts, Reservation, SqliteSampleStream, staleness_bound
from megatron_stream.rl.types import Completion, Group, Sample

pytestmark = pytest.mark.unit

MANY = 1000


def make_group(reservation, version=0):
    completion = Completion([1, 2], [-1.0, -1.0], [version, version + 1], "stop")
    return Group(*reservation, [7], [Sample(completion, 1.0)])


@pytest.fixture
def stream(tmp_path):
    stream = SqliteSampleStream(tmp_path / "samples.sqlite")
    yield stream
    stream.close()


def fill(stream, n, version=0):
    for reservation in stream.reserve(n, MANY):
        stream.append(make_group(reservation, version))


def claim(stream, n, step, min_version=0, deadline_s=0.0, stop=None):
    return stream.claim(n, step, min_version, deadline_s, stop)


def indices(groups):
    return [group.prompt_index for group in groups]


def test_groups_come_whole_and_in_order_of_arrival(stream):
    first, second = stream.reserve(2, MANY)
    assert (first, second) == (Reservation(0, 0), Reservation(1, 0))
    assert stream.append(make_group(second)) and stream.append(make_group(first))
    assert claim(stream, 2, step=1) == [make_group(second), make_group(first)]
    assert stream.reserve(1, MANY) == [Reservation(2, 0)]


def test_a_second_delivery_has_no_effect_and_an_unreserved_one_is_refused(stream):
    (reservation,) = stream.reserve(1, MANY)
    assert stream.append(make_group(reservation))
    assert not stream.append(make_group(reservation))
    assert stream.counts().ready == 1
    with pytest.raises(ValueError, match="prompt 5, attempt 0 was never reserved"):
        stream.append(make_group(Reservation(5, 0)))


def test_a_step_asked_again_gets_the_same_groups(stream):
    fill(stream, 4)
    assert claim(stream, 2, step=1) == claim(stream, 2, step=1)
    assert indices(claim(stream, 2, step=2)) == [2, 3]


def test_stale_groups_are_counted_and_their_prompts_come_first_again(stream):
    fill(stream, 2, version=0)
    fill(stream, 2, version=3)
    assert indices(claim(stream, 2, step=5, min_version=1)) == [2, 3]
    assert stream.counts().stale == 2
    assert stream.reserve(3, MANY) == [Reservation(0, 1), Reservation(1, 1), Reservation(4, 0)]


def test_the_oldest_token_decides(stream):
    fill(stream, 1, version=3)  # tokens of versions 3 and 4
    with pytest.raises(TimeoutError):
        claim(stream, 1, step=1, min_version=4)
    assert stream.counts().stale == 1


def test_the_deadline_error_names_what_it_waits_for(stream):
    fill(stream, 1)
    stream.reserve(2, MANY)
    with pytest.raises(TimeoutError, match=r"step 3 waited 0\.1 s for 4 groups.*version 0: 1 are ready, 2 being"):
        claim(stream, 4, step=3, deadline_s=0.1)


def test_stop_ends_the_wait(stream):
    def stop():
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        claim(stream, 1, step=1, deadline_s=60, stop=stop)


def test_claim_waits_for_another_process_to_deliver(stream, tmp_path):
    def deliver():
        other = SqliteSampleStream(tmp_path / "samples.sqlite")
        time.sleep(0.1)
        fill(other, 1)
        other.close()

    thread = threading.Thread(target=deliver)
    thread.start()
    assert indices(claim(stream, 1, step=1, deadline_s=30)) == [0]
    thread.join()


def test_rewind_repeats_the_same_steps(stream):
    fill(stream, 8)
    steps = {step: claim(stream, 2, step) for step in (1, 2, 3)}
    assert stream.rewind(1) == 4
    assert stream.counts() == Counts(ready=6, claimed=2)
    assert {step: claim(stream, 2, step) for step in (2, 3)} == {s: steps[s] for s in (2, 3)}


def test_the_bound_counts_ready_generating_and_training_groups(stream):
    bound = staleness_bound(max_lag_versions=1, groups_per_step=2)
    reserved = stream.reserve(MANY, bound)
    assert len(reserved) == bound == 4
    for reservation in reserved:
        stream.append(make_group(reservation))
    claim(stream, 2, step=1)
    assert stream.reserve(MANY, bound) == []  # two in training, two ready
    claim(stream, 2, step=2)  # asking for step 2: step 1 is done
    assert len(stream.reserve(MANY, bound)) == 2


def test_no_staleness_allowed_does_not_block_actor_and_trainer_for_ever(stream):
    bound = staleness_bound(max_lag_versions=0, groups_per_step=2)
    for step in range(1, 4):
        with pytest.raises(TimeoutError):
            claim(stream, 2, step)
        for reservation in stream.reserve(MANY, bound):
            stream.append(make_group(reservation))
        assert len(claim(stream, 2, step)) == 2


def test_many_openers_at_once(tmp_path):
    errors = []

    def work():
        try:
            stream = SqliteSampleStream(tmp_path / "new.sqlite")
            fill(stream, 3)
            stream.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    check = SqliteSampleStream(tmp_path / "new.sqlite")
    assert sorted(indices(claim(check, 18, step=1))) == list(range(18))


def _actor(path, crash_after):
    """Generates until prompts 0-7 are delivered; kills itself after that many actions."""
    actions = 0

    def act():
        nonlocal actions
        actions += 1
        if actions > crash_after:
            os.kill(os.getpid(), signal.SIGKILL)

    stream = SqliteSampleStream(path)
    stream.release()
    while stream.counts().ready + stream.counts().claimed < 8:
        act()
        reservations = stream.reserve(2, 8)
        act()
        for reservation in reservations:
            stream.append(make_group(reservation))
            act()


def _trainer(path, checkpoints, crash_after):
    """Steps of 2 groups with a checkpoint each: a file that holds the prompts trained so far."""
    done = sorted(checkpoints.iterdir(), key=lambda p: int(p.name))
    trained = done[-1].read_text().split() if done else []
    stream = SqliteSampleStream(path)
    stream.rewind(len(done))
    for step in range(len(done) + 1, 5):
        if crash_after == ("claim", step):
            os.kill(os.getpid(), signal.SIGKILL)
        trained += [str(g.prompt_index) for g in stream.claim(2, step, 0, 20.0)]
        if crash_after == ("train", step):
            os.kill(os.getpid(), signal.SIGKILL)
        temporary = checkpoints.parent / "temporary"
        temporary.write_text(" ".join(trained))
        temporary.rename(checkpoints / str(step))
        if crash_after == ("save", step):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("trainer_crash", [("claim", 2), ("train", 2), ("save", 2)])
@pytest.mark.parametrize("actor_crash", [1, 2, 3, 6])
def test_killed_anywhere_no_prompt_is_skipped_or_trained_twice(tmp_path, actor_crash, trainer_crash):
    path, checkpoints = tmp_path / "samples.sqlite", tmp_path / "checkpoints"
    checkpoints.mkdir()
    context = multiprocessing.get_context("fork")  # the children do nothing but SQLite
    crashes = {"actor": [actor_crash, actor_crash, MANY], "trainer": [trainer_crash, None]}
    targets = {
        "actor": lambda crash: context.Process(target=_actor, args=(path, crash)),
        "trainer": lambda crash: context.Process(target=_trainer, args=(path, checkpoints, crash)),
    }
    running = {}
    deadline = time.monotonic() + 60
    while running or any(crashes.values()):
        assert time.monotonic() < deadline, f"waited for {list(running)}"
        for name, planned in crashes.items():
            process = running.get(name)
            if process is None and planned:
                running[name] = targets[name](planned.pop(0))
                running[name].start()
            elif process is not None and not process.is_alive():
                assert process.exitcode in (0, -signal.SIGKILL)
                del running[name]
        time.sleep(0.005)
    final = max(checkpoints.iterdir(), key=lambda p: int(p.name)).read_text().split()
    assert sorted(map(int, final)) == list(range(8))
