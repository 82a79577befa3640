"""The client's side of vLLM's token-in/token-out protocol."""

import asyncio
import importlib

import pytest
from aiohttp import web

from megatron_stream.config import SamplingConfig
from megatron_stream.rl.client import EngineError, GenerateClient, parse_response, request_body
from megatron_stream.rl.types import Completion

pytestmark = pytest.mark.unit


def answer(logprobs=(-0.5, -1.0, -1.5), spans=(("0", 0, 2), ("1", 2, 3)), finish_reason="length", **changes):
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "token_ids": list(range(10, 10 + len(logprobs))),
        "logprobs": {"content": [{"token_id": 10 + i, "logprob": x} for i, x in enumerate(logprobs)]},
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
    }
    return {"request_id": "generate-tokens-a", "choices": [{**choice, **changes}]}


def test_spans_become_one_version_per_token():
    expected = Completion([10, 11, 12], [-0.5, -1.0, -1.5], [0, 0, 1], "length")
    assert parse_response(answer()) == expected


def test_an_empty_completion_is_allowed():
    assert parse_response(answer((), ())) == Completion([], [], [], "length")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (answer(spans=[("0", 0, 2)]), "version labels for 2 of 3 tokens"),
        (answer(spans=[("0", 0, 1), ("1", 2, 3)]), "gap or overlap at token 2"),
        (answer(spans=[("0", 0, 2), ("1", 1, 3)]), "gap or overlap at token 1"),
        (answer(spans=[("default", 0, 3)]), "'default', which is not a version number"),
        (answer(weight_versions=None), "labels for 0 of 3 tokens"),
        (answer(logprobs=(-0.5, -9999.0, -1.0)), "log-probability of token 1 is nan or missing"),
        (answer(token_ids=[1, 2]), "3 of 2 tokens"),
        (answer(finish_reason="abort"), "aborted"),
        ({"choices": []}, "not enough values"),
        ({"error": "x"}, "not a GenerateResponse"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(broken, message):
    with pytest.raises(ValueError, match=message):
        parse_response(broken)


def test_vllm_reads_our_request_and_we_read_its_response():
    """Against vLLM's own schema, without an engine."""
    protocol = importlib.import_module("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    outputs = importlib.import_module("vllm.outputs")
    sampling = SamplingConfig(max_tokens=7, temperature=0.6, top_p=0.9, top_k=5)
    request = protocol.GenerateRequest.model_validate(request_body([1, 2], sampling, "3-0-1"))
    params = request.sampling_params
    assert (request.request_id, request.token_ids) == ("3-0-1", [1, 2])
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.6, 0.9, 5)
    assert (params.n, params.seed, params.logprobs, params.detokenize) == (1, None, 0, False)
    content = [protocol.GenerateLogProbsContent(token_id=t, logprob=-0.5) for t in (8, 9)]
    choice = protocol.GenerateTokensChoice(
        index=0,
        finish_reason="stop",
        token_ids=[8, 9],
        logprobs=protocol.GenerateLogProbs(content=content),
        weight_versions=[outputs.WeightVersionSpan("4", 0, 1), outputs.WeightVersionSpan("5", 1, 2)],
    )
    assert parse_response({"choices": [choice.model_dump()]}) == Completion([8, 9], [-0.5, -0.5], [4, 5], "stop")


async def _generate(handler, deadline_s=20.0):
    app = web.Application()
    app.router.add_post("/inference/v1/generate", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with GenerateClient(url, deadline_s) as client:
            return await client.generate([1], SamplingConfig(), "7-0-0")
    finally:
        await runner.cleanup()


def test_errors_name_the_engine_the_request_and_the_cause():
    async def refuses(request):
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    async def hangs(request):
        await asyncio.sleep(60)

    async def dies(request):
        request.transport.abort()
        await asyncio.sleep(60)

    url = r"engine http://127\.0\.0\.1:\d+"
    with pytest.raises(EngineError, match=f"{url}, request 7-0-0: status 400: .*prompt too long"):
        asyncio.run(_generate(refuses))
    with pytest.raises(EngineError, match=f"{url} did not answer request 7-0-0 within 0.2 s"):
        asyncio.run(_generate(hangs, deadline_s=0.2))
    with pytest.raises(EngineError, match=f"{url} is gone .*7-0-0"):
        asyncio.run(_generate(dies))


def test_an_engine_that_never_gets_ready_is_named():
    async def wait():
        async with GenerateClient("http://127.0.0.1:9") as client:
            await client.wait_ready(0.1, asyncio.Event())

    with pytest.raises(EngineError, match=r"127.0.0.1:9 was not ready within engine.start_deadline_s=0.1 s"):
        asyncio.run(wait())


def test_waiting_for_an_engine_can_be_stopped():
    async def wait():
        stop = asyncio.Event()
        async with GenerateClient("http://127.0.0.1:9") as client:
            waiting = asyncio.create_task(client.wait_ready(600.0, stop))
            await asyncio.sleep(0.1)
            stop.set()
            await asyncio.wait_for(waiting, 5)

    asyncio.run(wait())
