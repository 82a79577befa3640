"""Start vLLM's OpenAI-compatible server with our plugin: one engine, one process tree."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from megatron_stream.config import EngineConfig
from megatron_stream.engine.plugin import BACKEND
from megatron_stream.engine.settings import EngineSettings
from megatron_stream.errors import UserError

# torchrun and schedulers set these for the trainer; vLLM would take them for its own.
_FOREIGN = re.compile(r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


def server_environment(environment: dict[str, str]) -> dict[str, str]:
    """The environment of an engine: without a launcher's variables, with what vLLM on this platform needs."""
    clean = {k: v for k, v in environment.items() if not _FOREIGN.fullmatch(k)}
    clean |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "megatron_stream"}
    clean.setdefault("OMP_NUM_THREADS", "1")
    clean.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    clean.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    return clean


def server_arguments(config: EngineConfig, model: Path, settings: EngineSettings, worker_cls: str = "") -> list[str]:
    """vLLM's command line for this configuration."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "served-model-name": "policy",
        "host": config.host,
        "port": config.port,
        "pipeline-parallel-size": config.pipeline_parallel,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": max(config.max_batched_tokens, config.max_num_seqs),
        "kv-cache-memory-bytes": config.kv_cache_mib << 20,
        # Log-probabilities as sampled from: after temperature, as the trainer computes them.
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "worker-cls": worker_cls or "megatron_stream.engine.worker.StreamWorker",
        "scheduler-cls": "megatron_stream.engine.scheduler.StreamScheduler",
        "additional-config": json.dumps(settings.additional_config()),
        "distributed-executor-backend": "mp",
        "generation-config": "vllm",
    }
    flags = ["--enforce-eager", "--no-async-scheduling", "--disable-uvicorn-access-log", "--enable-scale-out"]
    flags.append("--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching")
    return [f"--{key}={value}" for key, value in arguments.items()] + flags


def serve(config: EngineConfig, model: Path, settings: EngineSettings, worker_cls: str = "") -> None:
    """Run the server in this process until it is told to stop.

    Raises UserError when vLLM is missing.
    """
    environment = server_environment(dict(os.environ))
    os.environ.clear()
    os.environ.update(environment)
    try:
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise UserError(f"the engine needs vLLM ({error}); pip install 'megatron-stream[cpu]' or [gpu]") from error
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(server_arguments(config, model, settings, worker_cls))
    validate_parsed_serve_args(arguments)
    uvloop.run(run_server(arguments))
