"""The invariants of an update, with a real vLLM engine of two stages that generates all the while."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_stream.config import SamplingConfig
from megatron_stream.observe.labels import count_wrong_labels
from megatron_stream.observe.summary import count_mixed_tokens
from megatron_stream.rl.types import Completion
from tests.engine.replay import Replay
from tests.engine.running import Publisher, RunningEngine, base_weights, expected_checksums, perturbed

pytestmark = pytest.mark.engine

# No prompt is prefilled in chunks here: a commit between two chunks leaves keys of two versions in the cache,
# which labels of tokens cannot show (DESIGN section 8).
TOLERANCE = 2e-3  # fp32 log-probabilities, vLLM against HF transformers
PROMPTS = [[3 + (7 * i + j) % 60 for j in range(5 + 9 * i)] for i in range(6)]


class Run:
    """A publisher, the weights of every version it published, and generation in the background."""

    def __init__(self, engine: RunningEngine, tiny: Path) -> None:
        self.engine, self.base = engine, base_weights(tiny)
        self.publisher = Publisher(engine)
        committed = engine.status()["committed"]
        self.weights: dict[int, Any] = {committed: perturbed(self.base, committed) if committed else self.base}
        self.next = committed + 1

    def publish(self) -> int:
        version = self.next
        self.weights[version] = perturbed(self.base, version)
        self.publisher.publish(version, self.weights[version])
        self.next += 1
        return version

    def generate_meanwhile(self, prompts: list[list[int]], max_tokens: int, name: str, action: Any) -> list[Completion]:
        """Run `action` while the prompts are being completed."""
        found: list[Completion] = []
        sampling = SamplingConfig(max_tokens=max_tokens, temperature=1.0)

        def work() -> None:
            found.extend(asyncio.run(self.engine.generate(prompts, sampling, name)))

        thread = threading.Thread(target=work)
        thread.start()
        action()
        thread.join(timeout=120)
        assert not thread.is_alive()
        return found


@pytest.fixture
def run(engine: RunningEngine, tiny: Path) -> Any:
    run = Run(engine, tiny)
    yield run
    run.publisher.close()


@pytest.fixture(scope="module")
def replay(tiny: Path) -> Replay:
    return Replay(tiny)


def _assert_same_weights(engine: RunningEngine, weights: Any) -> None:
    actual = engine.checksums()
    names = [key for key in actual if key.endswith(".weight")]
    assert len(names) > 20
    expected = expected_checksums(engine.spec, weights, names)
    assert {k: actual[k] for k in expected} == expected
    assert set(expected) == set(names)


def test_every_parameter_is_bitwise_the_trainers_after_every_update(run: Run) -> None:
    if run.next == 1:  # as vLLM's own loader read the checkpoint: the tables agree with it
        _assert_same_weights(run.engine, run.base)
    for _ in range(3):
        version = run.publish()
        run.engine.wait_committed(version)
        _assert_same_weights(run.engine, run.weights[version])
    names = [key for key in run.engine.checksums() if "embed_tokens" in key]
    assert {name[0] for name in names} == {"0", "1"}, "the tied head of the last stage is updated, too"


def test_labels_are_exact_and_no_token_is_mixed_while_updates_stream(run: Run, replay: Replay) -> None:
    first = run.next

    def updates() -> None:
        for _ in range(6):  # often enough that some fall into the generation on any machine
            time.sleep(0.2)
            run.engine.wait_committed(run.publish())

    prompts = PROMPTS * 2
    completions = run.generate_meanwhile(prompts, 60, f"labels{first}-", updates)
    seen = {version for c in completions for version in c.versions}
    assert len(seen) >= 3, f"generation saw only versions {seen}"
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.versions) == len(completion.token_ids) > 0
        assert completion.versions == sorted(completion.versions), "versions never go back"
        assert replay.error(prompt, completion, completion.versions, run.weights) < TOLERANCE
    events = run.engine.events()
    assert count_mixed_tokens(events) == 0
    assert count_wrong_labels(events) == 0
    assert not [e for e in events if e["name"] == "preempted"], "an update preempts nothing"
    switched = next(c for c in completions if len(set(c.versions)) > 1)
    late = [switched.versions[0], *switched.versions[:-1]]  # every label one token late, as stock vLLM has them
    prompt = prompts[completions.index(switched)]
    assert replay.error(prompt, switched, late, run.weights) > 10 * TOLERANCE, "the replay would see a wrong label"


def test_a_prompt_is_not_answered_with_keys_of_old_weights(run: Run, replay: Replay) -> None:
    prompt = [5 + i % 50 for i in range(200)]
    sampling = SamplingConfig(max_tokens=2)
    for _ in range(2):
        version = run.publish()
        run.engine.wait_committed(version)
        for again in range(2):  # the second time from the prefix cache, of this version
            (completion,) = asyncio.run(run.engine.generate([prompt], sampling, f"prefix{version}-{again}"))
            assert completion.versions == [version] * len(completion.versions)
            assert replay.error(prompt, completion, completion.versions, run.weights) < TOLERANCE


def test_log_probabilities_are_those_of_the_temperature(run: Run, replay: Replay) -> None:
    """As the trainer computes them: tests/dist/test_token_logprobs.py."""
    sampling = SamplingConfig(max_tokens=12, temperature=0.6)
    for prompt, completion in zip(PROMPTS, asyncio.run(run.engine.generate(PROMPTS, sampling, "warm")), strict=True):
        assert replay.error(prompt, completion, completion.versions, run.weights, 0.6) < TOLERANCE
        assert replay.error(prompt, completion, completion.versions, run.weights, 1.0) > 10 * TOLERANCE


def test_newest_wins_when_updates_come_closer_than_a_transfer(run: Run) -> None:
    before = run.engine.status()["commits"]
    versions = [run.publish() for _ in range(6)]
    run.engine.wait_committed(versions[-1])
    _assert_same_weights(run.engine, run.weights[versions[-1]])
    assert run.engine.status()["commits"] - before <= len(versions)
    committed = [e["args"]["version"] for e in run.engine.events() if e["name"] == "commit"]
    assert max(committed) == versions[-1]
    for stage in (0, 1):
        own = [e for e in run.engine.events() if e["name"] == "commit" and e["track"] == f"engine stage {stage}"]
        order = [e["args"]["version"] for e in sorted(own, key=lambda e: e["start"])]
        assert order == sorted(order), "versions never go back"


def test_what_was_not_validated_is_never_committed(run: Run) -> None:
    """A rolled-back attempt is staged, and then replaced by the accepted one."""
    version = run.next
    rejected, accepted = perturbed(run.base, 10_000 + version), perturbed(run.base, version)
    publisher = run.publisher
    publisher.set_weights(1, rejected)
    publisher.step(1, version, attempt=1, validate=False)
    publisher.set_weights(0, accepted)
    publisher.step(0, version, attempt=1)
    time.sleep(1.0)
    assert run.engine.status()["committed"] < version
    publisher.set_weights(1, accepted)
    publisher.step(1, version, attempt=2)
    run.engine.wait_committed(version)
    _assert_same_weights(run.engine, accepted)
    run.next += 1


def test_a_stage_that_skips_a_version_blocks_nobody(run: Run) -> None:
    skipped, version = run.next, run.next + 1
    run.weights[version] = perturbed(run.base, version)
    run.publisher.set_weights(1, perturbed(run.base, skipped))
    run.publisher.step(1, skipped)  # stage 0 never sends this one
    time.sleep(0.3)
    run.publisher._links[0].stepped("stage 0", skipped, 1)
    run.publisher._links[0].before_change("stage 0")
    run.publisher.publish(version, run.weights[version])
    run.engine.wait_committed(version)
    _assert_same_weights(run.engine, run.weights[version])
    run.next = version + 1


def test_an_idle_engine_commits_too(run: Run) -> None:
    time.sleep(1.5)
    version = run.publish()
    run.engine.wait_committed(version, deadline_s=10)


def test_the_detector_sees_stages_that_switch_at_different_batches(tiny: Path, tmp_path: Path) -> None:
    """Negative control of the mixed-token count; on an engine started by torchrun, beside another one."""
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    engine = RunningEngine(tiny, tmp_path, "tests.engine.broken_worker.LateWorker", torchrun)
    try:
        engine.wait_ready()
        run = Run(engine, tiny)

        def updates() -> None:
            for _ in range(2):
                time.sleep(0.7)
                run.engine.wait_committed(run.publish())

        run.generate_meanwhile(PROMPTS, 40, "mixed-", updates)
        run.publisher.close()
        assert count_mixed_tokens(engine.events()) > 0
    finally:
        engine.stop()


def test_messages_that_are_not_ours_are_answered(engine: RunningEngine) -> None:
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{engine.control}")
    socket.send(b"\xc1 not msgpack")
    assert socket.poll(5000), "the coordinator answers instead of dying"
    assert b"not our protocol" in socket.recv()
    socket.close(linger=0)
    assert engine.status()["error"] == ""
