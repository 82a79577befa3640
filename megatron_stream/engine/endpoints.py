"""HTTP routes of the streaming engine (entry point `vllm.endpoint_plugins`) and the coordinator's start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from megatron_stream.engine.coordinator import Coordinator
from megatron_stream.engine.settings import settings_of

logger = logging.getLogger("vllm.megatron_stream")


class StreamEndpoints:
    """vLLM's EndpointPlugin: `GET /stream/status` says which version runs and what is on its way."""

    name = "megatron_stream"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter()
        router.add_api_route("/stream/status", _status, methods=["GET"])
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        if engine_client.vllm_config.parallel_config.pipeline_parallel_size > 1:
            # In eager mode stages after the first allocate their input buffers only in a dummy batch, which
            # the CPU worker does not run at start (vllm/v1/worker/cpu_worker.py, _should_warm_up_model).
            await engine_client.collective_rpc("execute_dummy_batch")
        state.megatron_stream = Coordinator(engine_client, settings_of(engine_client.vllm_config))
        await state.megatron_stream.start()
        state.megatron_stream_task = asyncio.create_task(state.megatron_stream.run())
        state.megatron_stream_task.add_done_callback(_end_server)


def _end_server(coordinator: asyncio.Task[None]) -> None:
    """An engine that nobody can update any more must not look alive."""
    if coordinator.cancelled() or (error := coordinator.exception()) is None:
        return
    logger.error("megatron_stream: error: the commit coordinator ended (%r); ending the engine", error, exc_info=error)
    os.kill(os.getpid(), signal.SIGTERM)


async def _status(request: Request) -> dict[str, Any]:
    coordinator: Coordinator = request.app.state.megatron_stream
    return coordinator.status()
