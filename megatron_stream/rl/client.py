"""Client of one engine: vLLM's token-in/token-out endpoint, `POST /inference/v1/generate`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any

import aiohttp

from megatron_stream.config import SamplingConfig
from megatron_stream.errors import RunError
from megatron_stream.rl.types import Completion

REQUEST_DEADLINE_S = 600.0
_READY_POLL_S = 0.5
_STATUS_TIMEOUT = aiohttp.ClientTimeout(total=5.0)

_NO_LOGPROB = -9999.0  # what vLLM sends for nan, -inf or a missing log-probability


class EngineError(RunError):
    """An engine is gone, or answered something that cannot be trained on. The message names its URL."""


class GenerateClient:
    """Use as `async with GenerateClient(url) as client`; any number of requests may run at once.

    The engine must report log-probabilities of the distribution that it samples from
    (`logprobs_mode=processed_logprobs`), and label its weights with the versions "0", "1", ...
    """

    def __init__(self, base_url: str, deadline_s: float = REQUEST_DEADLINE_S) -> None:
        self.base_url = base_url.rstrip("/")
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GenerateClient:
        # force_close: the server drops idle connections after 5 s, and a request sent at that moment on a
        # kept one fails as if the engine had died. limit=0: aiohttp would queue all but 100 requests.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def wait_ready(self, deadline_s: float, stop: asyncio.Event) -> None:
        """Until the engine can be asked, or `stop` is set. Raises EngineError after `deadline_s` seconds."""
        assert self._session is not None, "use the client as a context manager"
        deadline = time.monotonic() + deadline_s
        while not stop.is_set():
            try:
                async with self._session.get(f"{self.base_url}/stream/status", timeout=_STATUS_TIMEOUT) as response:
                    if response.status == 200 and (await response.json())["ready"]:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {self.base_url} was not ready within engine.start_deadline_s={deadline_s:g} s"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _READY_POLL_S)

    async def generate(self, prompt_ids: list[int], sampling: SamplingConfig, request_id: str) -> Completion:
        """One completion of one prompt. Raises EngineError, at the latest after the client's deadline."""
        body = request_body(prompt_ids, sampling, request_id)
        try:
            return parse_response(await self._post(body))
        except TimeoutError as error:
            raise EngineError(
                f"engine {self.base_url} did not answer request {request_id} within {self._deadline_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"engine {self.base_url} is gone (request {request_id}): {reason}") from error
        except ValueError as error:
            raise EngineError(f"engine {self.base_url}, request {request_id}: {error}") from error

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None, "use the client as a context manager"
        async with self._session.post(f"{self.base_url}/inference/v1/generate", json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:500]}")
            answer: dict[str, Any] = await response.json()
            return answer


def request_body(prompt_ids: list[int], sampling: SamplingConfig, request_id: str) -> dict[str, Any]:
    """vLLM's GenerateRequest as JSON; `logprobs` 0 asks for the sampled token's alone.

    No `seed`: on vLLM 0.32's CPU engine a seeded request whose prompt is prefilled in chunks ends the engine
    ("CPU Generator does not use offset", vllm/v1/worker/gpu_model_runner.py, _bookkeeping_sync).
    """
    return {
        "request_id": request_id,
        "token_ids": prompt_ids,
        "sampling_params": {
            "n": 1,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def parse_response(answer: dict[str, Any]) -> Completion:
    """The completion in vLLM's GenerateResponse. Raises ValueError for what cannot be trained on."""
    try:
        (choice,) = answer["choices"]
        token_ids = choice["token_ids"] or []
        logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]
        spans = choice["weight_versions"] or []
        finish_reason = choice["finish_reason"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the answer is not a GenerateResponse of vLLM 0.32 ({error!r})") from error
    if finish_reason == "abort":
        raise ValueError("the engine aborted the request")
    if _NO_LOGPROB in logprobs:
        raise ValueError(f"the log-probability of token {logprobs.index(_NO_LOGPROB)} is nan or missing")
    return Completion(token_ids, logprobs, _expand(spans, len(token_ids)), finish_reason)


def _expand(spans: list[dict[str, Any]], n_tokens: int) -> list[int]:
    """One version per token from spans that cover the tokens without gap or overlap."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"the version labels have a gap or overlap at token {span['start']}")
        if not str(span["version"]).isdecimal():
            raise ValueError(f"its weights are labelled {span['version']!r}, which is not a version number")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != n_tokens:
        raise ValueError(f"version labels for {len(versions)} of {n_tokens} tokens")
    return versions
