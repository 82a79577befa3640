"""HTTP routes of the streaming engine (entry point `vllm.endpoint_plugins`) and the coordinator's start."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

from megatron_stream.engine.coordinator import Coordinator
from megatron_stream.engine.settings import settings_of


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
        state.megatron_stream_task = asyncio.create_task(state.megatron_stream.run())


async def _status(request: Request) -> dict[str, Any]:
    coordinator: Coordinator = request.app.state.megatron_stream
    task: asyncio.Task[None] = request.app.state.megatron_stream_task
    if task.done():
        raise HTTPException(500, f"the commit coordinator ended: {task.exception()!r}")
    return coordinator.status()
