"""The actor against small in-process servers that speak vLLM's protocol."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from megatron_stream.config import ActorConfig, AlgorithmConfig, RunConfig, SamplingConfig, TaskConfig
from megatron_stream.errors import UserError
from megatron_stream.observe.events import EventLog, read_events
from megatron_stream.rl.actor import Actor, run_actor
from megatron_stream.rl.client import EngineError, GenerateClient
from megatron_stream.rl.rewards import Scorer
from megatron_stream.rl.samples import SqliteSampleStream, stream_path
from megatron_stream.rl.tasks import Task

pytestmark = pytest.mark.unit

GROUP = 2
DEADLINE_S = 60.0


class ByteTokenizer:
    """One token a byte."""

    chat_template = "the question alone"

    def apply_chat_template(self, conversation, **kwargs):
        return list(conversation[-1]["content"].encode())

    def decode(self, token_ids, **kwargs):
        return bytes(token_ids).decode()


@dataclass
class Server:
    """Answers three tokens per request, the last of version + 1; holds requests while `gate` is clear."""

    url: str = ""
    version: int = 0
    ready: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    most_waiting: int = 0
    requests: list[dict] = field(default_factory=list)

    async def status(self, request):
        return web.json_response({"ready": self.ready})

    async def handle(self, request):
        body = await request.json()
        self.requests.append(body)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.version < 0:
            return web.Response(status=500, text="EngineCore died")
        ids = [17, 18, 19]
        spans = [(str(self.version), 0, 2), (str(self.version + 1), 2, 3)]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in ids]},
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
        }
        return web.json_response({"request_id": body["request_id"], "choices": [choice]})


@asynccontextmanager
async def serving(n=1):
    servers, runners = [Server() for _ in range(n)], []
    for server in servers:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", server.handle)
        app.router.add_get("/stream/status", server.status)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        server.gate.set()
    try:
        yield servers
    finally:
        for runner in runners:
            await runner.cleanup()


def make_config(in_flight=2, groups_per_step=2, max_lag=1):
    return RunConfig(
        dir="unused",
        task=TaskConfig(dataset="chain_sum", size=6),
        actor=ActorConfig(GROUP, in_flight, SamplingConfig(max_tokens=3, temperature=0.7)),
        algorithm=AlgorithmConfig(groups_per_step=groups_per_step, max_lag_versions=max_lag),
    )


@asynccontextmanager
async def acting(config, servers, run_dir):
    """A running actor and its stream; the actor is stopped at the end and must end well."""
    stop = asyncio.Event()
    urls = [server.url for server in servers]
    actor = asyncio.create_task(run_actor(config, urls, run_dir, stop, ByteTokenizer()))
    stream = SqliteSampleStream(stream_path(run_dir))
    try:
        yield actor, stream
        stop.set()
        await asyncio.wait_for(actor, DEADLINE_S)
    finally:
        actor.cancel()
        stream.close()


async def until(condition, actor, what):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            if actor.done():
                actor.result()
            await asyncio.sleep(0.01)


async def claim(stream, actor, n, step, min_version=0):
    claimed = asyncio.create_task(asyncio.to_thread(stream.claim, n, step, min_version, DEADLINE_S))
    await asyncio.wait({claimed, actor}, return_when=asyncio.FIRST_COMPLETED)
    return await claimed


def test_groups_arrive_scored_and_labelled_and_the_bound_holds_the_actor(tmp_path):
    async def scenario():
        async with serving() as (server,), acting(make_config(), [server], tmp_path) as (actor, stream):
            await until(lambda: stream.counts().ready == 4, actor, "the bound: (1 + 1) x 2 groups")
            await asyncio.sleep(0.3)
            assert stream.counts().unconsumed == 4 and len(server.requests) == 4 * GROUP
            groups = await claim(stream, actor, 2, step=1)
            await asyncio.sleep(0.3)
            assert stream.counts().unconsumed == 4  # claimed is not yet trained
            groups += await claim(stream, actor, 2, step=2)
            await until(lambda: stream.counts().unconsumed == 4 and stream.counts().ready, actor, "more")
            return groups, server.requests

    groups, requests = asyncio.run(scenario())
    assert sorted(g.prompt_index for g in groups) == [0, 1, 2, 3]
    prompts = {tuple(body["token_ids"]) for body in requests}
    for group in groups:
        assert len(group.samples) == GROUP and tuple(group.prompt_ids) in prompts
        assert group.samples[0].completion.versions == [0, 0, 1]
        assert group.samples[0].reward == 0.0 and group.info == {"timed_out": [], "reward_errors": {}}
    assert len({body["request_id"] for body in requests}) == len(requests)
    events = read_events(tmp_path / "events")
    first = next(e for e in events if e["name"] == "request" and e["args"]["id"] == "0-0-1")
    assert first["track"] == "actor" and first["end"] >= first["start"]
    assert first["args"] == {"id": "0-0-1", "group": "0-0", "tokens": 3, "versions": [[0, 0], [1, 2]]}
    assert {e["args"]["group"] for e in events if e["name"] == "reward"} >= {"0-0", "1-0"}


def test_it_keeps_the_engine_full_while_no_trainer_is_there(tmp_path):
    async def scenario():
        config = make_config(in_flight=3, groups_per_step=8)
        async with serving() as (server,):
            server.gate.clear()
            async with acting(config, [server], tmp_path) as (actor, stream):
                await until(lambda: server.waiting == 3 * GROUP, actor, "three groups")
                await asyncio.sleep(0.2)
                assert server.most_waiting == 3 * GROUP
                server.gate.set()
                await until(lambda: stream.counts().ready == 16, actor, "all that the bound allows")
                assert server.most_waiting <= 3 * GROUP

    asyncio.run(scenario())


def test_stale_groups_are_generated_again(tmp_path):
    async def scenario():
        async with serving() as (server,), acting(make_config(), [server], tmp_path) as (actor, stream):
            await until(lambda: stream.counts().ready == 4, actor, "old groups")
            server.version = 5
            return await claim(stream, actor, 2, step=5, min_version=5), server.requests

    groups, requests = asyncio.run(scenario())
    assert {g.attempt for g in groups} == {1} and {g.oldest_version for g in groups} == {5}
    assert len({b["request_id"] for b in requests if b["request_id"].startswith("0-")}) == 2 * GROUP


def test_groups_go_to_the_least_loaded_engine(tmp_path):
    async def scenario():
        config = make_config(in_flight=4, groups_per_step=8)
        async with serving(2) as (slow, fast):
            slow.gate.clear()
            fast.gate.clear()
            async with acting(config, [slow, fast], tmp_path) as (actor, stream):
                await until(lambda: slow.waiting + fast.waiting == 4 * GROUP, actor, "four groups")
                assert slow.waiting == fast.waiting == 2 * GROUP
                fast.gate.set()
                await until(lambda: stream.counts().ready >= 10, actor, "the fast engine's groups")
                # It never got more than its share, so that the fast one had free slots.
                assert slow.waiting <= 3 * GROUP

    asyncio.run(scenario())


def test_a_dead_engine_ends_the_actor_with_its_name_and_releases_the_prompts(tmp_path):
    async def scenario():
        async with serving() as (server,):
            with pytest.raises(EngineError, match=f"engine {server.url}.*EngineCore died"):
                async with acting(make_config(), [server], tmp_path) as (actor, stream):
                    await until(lambda: stream.counts().ready == 4, actor, "a good start")
                    server.version = -1
                    await claim(stream, actor, 2, step=1)
                    await claim(stream, actor, 2, step=2)
                    await until(actor.done, actor, "its end")
        stream = SqliteSampleStream(stream_path(tmp_path))
        counts = stream.counts()
        assert counts.reserved == 0 and counts.due > 0
        stream.close()

    asyncio.run(scenario())


def test_stopped_and_started_again_it_takes_up_the_unfinished_prompts(tmp_path):
    async def scenario():
        async with serving() as (server,):
            server.gate.clear()
            async with acting(make_config(), [server], tmp_path) as (actor, _):
                await until(lambda: server.waiting == 2 * GROUP, actor, "two groups")
            server.gate.set()
            async with acting(make_config(), [server], tmp_path) as (actor, stream):
                return await claim(stream, actor, 4, step=1)

    groups = asyncio.run(scenario())
    assert sorted((g.prompt_index, g.attempt) for g in groups) == [(i, 0) for i in range(4)]


def make_hanging_verify():
    return lambda entry, text: time.sleep(600)


def test_a_reward_that_times_out_is_recorded_in_the_group(tmp_path):
    async def scenario():
        config, stop = make_config(in_flight=1, groups_per_step=1, max_lag=0), asyncio.Event()
        stream, events = SqliteSampleStream(tmp_path / "samples.sqlite"), EventLog(None)
        task = Task(config.task, ByteTokenizer())
        async with (
            serving() as (server,),
            Scorer(make_hanging_verify, timeout_s=0.2) as scorer,
            GenerateClient(server.url) as client,
        ):
            actor = asyncio.create_task(Actor(config, task, scorer, [client], stream, events).run(stop))
            groups = await claim(stream, actor, 1, step=1)
            stop.set()
            await asyncio.wait_for(actor, DEADLINE_S)
            return groups

    (group,) = asyncio.run(scenario())
    assert group.info["timed_out"] == [0, 1]
    assert group.info["reward_errors"]["1"] == "no reward within 0.2 s"
    assert [s.reward for s in group.samples] == [0.0, 0.0]


def test_no_engine_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="at least one engine"):
        asyncio.run(run_actor(make_config(), [], tmp_path, asyncio.Event()))
