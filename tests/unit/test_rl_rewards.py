"""The scorer: reward functions that hang, crash or raise cost one sample, also from a thread."""

import asyncio
import multiprocessing
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_stream.rl.rewards import Reward, Scorer

pytestmark = pytest.mark.unit

TIMEOUT_S = 0.5


def _verify(entry, text):
    if text == "hang":
        while True:
            time.sleep(60)
    if text == "sleep in a thread":
        thread = threading.Thread(target=time.sleep, args=(60,))
        thread.start()
        thread.join()
    if text == "die":
        os._exit(1)
    if text == "pid":
        return os.getpid()
    return entry / float(text)


def make_verify():
    return _verify


def broken_verify():
    raise ImportError("no such verifier")


def _orphan(pids):
    """Reports the pid of a reward process, leaves it hanging and waits to be killed."""

    async def hang():
        async with Scorer(make_verify, 600.0, workers=1) as scorer:
            pid = int((await scorer.score(6, "pid")).value)
            hung = asyncio.create_task(scorer.score(6, "hang"))
            await asyncio.sleep(0.5)  # so that it hangs, and does not wait for work, when we are killed
            pids.send(pid)
            await hung

    asyncio.run(hang())


async def score_all(texts, workers=1):
    async with Scorer(make_verify, TIMEOUT_S, workers) as scorer:
        return await asyncio.gather(*(scorer.score(6, text) for text in texts))


def run_in_thread(coroutine):
    results = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(coroutine)))
    thread.start()
    thread.join(60)
    return results[0]


@pytest.mark.parametrize("run", [asyncio.run, run_in_thread], ids=["main thread", "another thread"])
@pytest.mark.parametrize("hang", ["hang", "sleep in a thread"])
def test_a_reward_that_hangs_is_scored_zero_and_the_others_go_on(run, hang):
    rewards = run(score_all(["2", hang, "3", "2"], workers=2))
    assert [r.value for r in rewards] == [3, 0, 2, 3]
    assert [r.timed_out for r in rewards] == [False, True, False, False]
    assert rewards[1].error == "no reward within 0.5 s"


def test_a_hung_process_is_killed_and_replaced_and_a_good_one_kept():
    first, second, _, third = (r.value for r in asyncio.run(score_all(["pid", "pid", "hang", "pid"])))
    assert first == second != third
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


def test_a_reward_that_raises_dies_or_is_no_number_is_reported():
    rewards = asyncio.run(score_all(["0", "die", "nan", "2"]))
    assert [r.value for r in rewards] == [0, 0, 0, 3]
    assert [r.error.split(":")[0] for r in rewards] == [
        "ZeroDivisionError",
        "the reward process died",
        "the reward is nan",
        "",
    ]
    assert rewards[3] == Reward(3.0)


def test_a_verifier_that_cannot_start_is_an_error_and_not_a_zero():
    async def score():
        async with Scorer(broken_verify, TIMEOUT_S) as scorer:
            await scorer.score(6, "2")

    with pytest.raises(RuntimeError, match="could not start: ImportError: no such verifier"):
        asyncio.run(score())


def test_cancelling_kills_the_process_that_was_at_work():
    async def cancel():
        async with Scorer(partial(make_verify), 60.0, 1) as scorer:
            pid = int((await scorer.score(6, "pid")).value)
            hung = asyncio.create_task(scorer.score(6, "hang"))
            await asyncio.sleep(0.1)
            hung.cancel()
            await asyncio.gather(hung, return_exceptions=True)
            return pid, int((await scorer.score(6, "pid")).value)

    killed, replacement = asyncio.run(cancel())
    assert killed != replacement
    with pytest.raises(ProcessLookupError):
        os.kill(killed, 0)


def test_a_hung_process_does_not_outlive_a_killed_parent():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_orphan, args=(theirs,))
    parent.start()
    assert ours.poll(60)
    pid = ours.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline, f"waited for reward process {pid} to end"
        time.sleep(0.02)


def _is_running(pid):
    """False also for a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False
