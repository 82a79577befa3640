"""The actor: keeps the engines full of rollouts and delivers scored groups to the sample stream.

It never waits for the trainer. What may hold it is the staleness bound alone: when so many groups are
unconsumed that a further one would be too old by the time it is trained on (`staleness_bound`), it starts
none until the trainer has consumed some.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_stream.config import RunConfig
from megatron_stream.errors import UserError
from megatron_stream.observe.events import EventLog
from megatron_stream.rl.client import GenerateClient
from megatron_stream.rl.rewards import Scorer
from megatron_stream.rl.samples import (
    POLL_S,
    Reservation,
    SampleStream,
    SqliteSampleStream,
    staleness_bound,
    stream_path,
)
from megatron_stream.rl.tasks import Entry, Task, Tokenizer, make_verifier
from megatron_stream.rl.types import Completion, Group, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class _Rollout:
    """A group whose generation is done and whose scoring is not."""

    reservation: Reservation
    entry: Entry
    prompt_ids: list[int]
    completions: list[Completion]

    @property
    def name(self) -> str:
        return _name(self.reservation)


def _name(reservation: Reservation) -> str:
    return f"{reservation.prompt_index}-{reservation.attempt}"


class Actor:
    """Reserve, generate, score, append; as many groups at once as the configuration allows."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        scorer: Scorer,
        clients: list[GenerateClient],
        stream: SampleStream,
        events: EventLog,
    ) -> None:
        self._config = config
        self._task = task
        self._scorer = scorer
        self._clients = clients
        self._stream = stream
        self._events = events
        self._load: Counter[str] = Counter()  # requests given to each engine and not answered
        self._bound = staleness_bound(config.algorithm.max_lag_versions, config.algorithm.groups_per_step)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises EngineError when an engine is gone; unfinished prompts are released."""
        generating: set[asyncio.Task[_Rollout]] = set()
        delivering: set[asyncio.Task[None]] = set()
        stopped = asyncio.create_task(stop.wait())
        await asyncio.to_thread(self._stream.release)  # what an actor before us left unfinished
        try:
            while not stopped.done():
                # Scoring does not count: the engine is to stay full while it goes on.
                free = self._config.actor.max_groups_in_flight - len(generating)
                if free > 0:
                    for reservation in await asyncio.to_thread(self._stream.reserve, free, self._bound):
                        generating.add(asyncio.create_task(self._generate(reservation)))
                # The timeout is for the bound: that it has room again is seen by asking.
                done, _ = await asyncio.wait(
                    {*generating, *delivering, stopped}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for rollout in generating & done:
                    delivering.add(asyncio.create_task(self._deliver(rollout.result())))
                for delivery in delivering & done:
                    delivery.result()
                generating -= done
                delivering -= done
        finally:
            unfinished = {*generating, *delivering, stopped}
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            self._stream.release()

    async def _generate(self, reservation: Reservation) -> _Rollout:
        """All samples of one prompt, on the least loaded engine: together they share the prompt's cache."""
        size = self._config.actor.group_size
        client = min(self._clients, key=lambda c: self._load[c.base_url])
        self._load[client.base_url] += size
        try:
            entry = self._task.entry(reservation.prompt_index)
            prompt_ids = self._task.encode(entry)
            requests = [self._request(client, reservation, prompt_ids, i) for i in range(size)]
            return _Rollout(reservation, entry, prompt_ids, await _all(requests))
        finally:
            self._load[client.base_url] -= size

    async def _request(
        self, client: GenerateClient, reservation: Reservation, prompt_ids: list[int], sample: int
    ) -> Completion:
        name = _name(reservation)
        start = time.time()
        completion = await client.generate(prompt_ids, self._config.actor.sampling, request_id=f"{name}-{sample}")
        self._events.add(
            "actor",
            "request",
            start,
            time.time(),
            id=f"{name}-{sample}",
            group=name,
            tokens=len(completion.token_ids),
            versions=completion.version_spans,
        )
        return completion

    async def _deliver(self, rollout: _Rollout) -> None:
        with self._events.span("actor", "reward", group=rollout.name) as args:
            texts = [self._task.decode(completion.token_ids) for completion in rollout.completions]
            rewards = await _all([self._scorer.score(rollout.entry, text) for text in texts])
            args["timed_out"] = sum(reward.timed_out for reward in rewards)
        group = Group(
            rollout.reservation.prompt_index,
            rollout.reservation.attempt,
            rollout.prompt_ids,
            [Sample(c, r.value) for c, r in zip(rollout.completions, rewards, strict=True)],
            info={
                "timed_out": [i for i, reward in enumerate(rewards) if reward.timed_out],
                "reward_errors": {str(i): reward.error for i, reward in enumerate(rewards) if reward.error},
            },
        )
        await asyncio.to_thread(self._stream.append, group)


async def _all(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results in order; when one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def run_actor(
    config: RunConfig,
    engine_urls: list[str],
    run_dir: Path,
    stop: asyncio.Event,
    tokenizer: Tokenizer | None = None,
) -> None:
    """The actor process: waits for the engines, then works until `stop` is set, or one is gone (EngineError).

    Reads the tokenizer from the folder `config.model.path` unless one is given. Writes
    `run_dir/samples.sqlite` and `run_dir/events/actor.jsonl`.
    """
    if not engine_urls:
        raise UserError("the actor needs at least one engine URL")
    if tokenizer is None:
        from transformers import AutoTokenizer  # seconds to import, and only needed here

        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    task = Task(config.task, tokenizer)
    events = EventLog(run_dir / "events" / "actor.jsonl")
    stream = SqliteSampleStream(stream_path(run_dir))
    try:
        async with AsyncExitStack() as stack:
            scorer = Scorer(partial(make_verifier, config.task), config.task.reward_timeout_s)
            await stack.enter_async_context(scorer)
            clients = [await stack.enter_async_context(GenerateClient(url)) for url in engine_urls]
            await _all([client.wait_ready(config.engine.start_deadline_s, stop) for client in clients])
            await Actor(config, task, scorer, clients, stream, events).run(stop)
    finally:
        stream.close()
        events.close()
