"""A real engine in its own process tree, and a publisher that streams weights to it as two trainer stages."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_stream.config import SamplingConfig
from megatron_stream.engine.server import server_environment
from megatron_stream.launch.ports import choose_ports
from megatron_stream.layout.llama import hf_shapes, vllm_blocks
from megatron_stream.model.build import stage_blocks
from megatron_stream.model.hf import ModelSpec, open_tensors, read_spec
from megatron_stream.observe.events import EventLog, read_events
from megatron_stream.rl.client import GenerateClient
from megatron_stream.rl.types import Completion
from megatron_stream.stream.nixl_lane import NixlSender
from megatron_stream.stream.sender import EngineLink

START_DEADLINE_S = 240.0
HfWeights = Mapping[str, torch.Tensor]

_SERVE = """
import sys, json
from pathlib import Path
from megatron_stream.config import EngineConfig
from megatron_stream.engine.settings import EngineSettings
from megatron_stream.engine.server import serve
if __name__ == "__main__":
    a = json.loads(sys.argv[1])
    settings = EngineSettings(**a["settings"])
    serve(EngineConfig(**a["config"]), Path(a["model"]), settings, a["worker_cls"])
"""


class RunningEngine:
    """PP=2 by default. `events()` are what engine and publisher wrote so far."""

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        worker_cls: str = "",
        environment: Mapping[str, str] | None = None,
        **config: Any,
    ) -> None:
        self.model, self.run_dir = model, run_dir
        self.spec: ModelSpec = read_spec(model)
        ports = choose_ports({"port": ("127.0.0.1", 0), "control": ("127.0.0.1", 0)})
        self.port, self.control = ports["port"], ports["control"]
        engine = {"port": self.port, "max_num_seqs": 16, "max_batched_tokens": 512, "kv_cache_mib": 64} | config
        arguments = {
            "settings": {"run_dir": str(run_dir), "control_port": self.control, "deadline_s": 60},
            "config": engine,
            "model": str(model),
            "worker_cls": worker_cls,
        }
        run_dir.mkdir(parents=True, exist_ok=True)
        variables = server_environment(dict(os.environ)) | {
            **(environment or {}),
            "VLLM_SERVER_DEV_MODE": "1",  # vLLM's own weight checksums
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        (run_dir / "serve.py").write_text(_SERVE)
        self.log = run_dir / "engine.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(run_dir / "serve.py"), json.dumps(arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        question = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(question, timeout=60) as answer:
            return json.load(answer)

    def status(self) -> dict[str, Any]:
        return self.request("/stream/status")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the engine ended:\n{self.log.read_text()[-3000:]}"
            try:
                if self.status()["ready"]:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the engine is not ready after {START_DEADLINE_S} s")

    def wait_committed(self, version: int, deadline_s: float = 60.0) -> None:
        deadline = time.monotonic() + deadline_s
        while (status := self.status())["committed"] < version:
            assert not status["error"], status["error"]
            assert time.monotonic() < deadline, f"version {version} not committed: {status}"
            time.sleep(0.05)

    def checksums(self) -> dict[str, str]:
        """vLLM's sha256 of every tensor: `stage/name` -> digest."""
        found = self.request("/weight_checker", {"action": "checksum"})["checksums"]
        return {f"{key.split(':')[1].removeprefix('pp')}/{key.split(':')[4]}": v for key, v in found.items()}

    async def generate(self, prompts: list[list[int]], sampling: SamplingConfig, name: str = "r") -> list[Completion]:
        async with GenerateClient(self.url) as client:
            requests = [client.generate(p, sampling, request_id=f"{name}{i}") for i, p in enumerate(prompts)]
            return list(await asyncio.gather(*requests))

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir / "events")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def base_weights(model: Path) -> dict[str, torch.Tensor]:
    """Version 0 in fp32, by HF name."""
    with open_tensors(model) as tensors:
        return {name: tensors.get(name).float() for name in sorted(tensors.names())}


def perturbed(weights: HfWeights, version: int) -> dict[str, torch.Tensor]:
    """Other weights for each version, far enough apart that log-probabilities tell them from each other."""
    generator = torch.Generator().manual_seed(1000 + version)
    return {name: value * (1 + 0.5 * torch.randn(value.shape, generator=generator)) for name, value in weights.items()}


class Publisher:
    """Two trainer stages in this process: the real links and lanes, weights from HF tensors."""

    def __init__(self, engine: RunningEngine, stages: int = 2) -> None:
        self.spec = engine.spec
        self.stages = stages
        self._blocks = {stage: stage_blocks(self.spec, stages, stage) for stage in range(stages)}
        self._parameters = [self._empty(stage) for stage in range(stages)]
        self._links = [self._link(engine, stage) for stage in range(stages)]
        self.version = 0

    def _empty(self, stage: int) -> dict[str, torch.Tensor]:
        shapes: dict[str, list[int]] = {}
        for block in self._blocks[stage]:
            known = shapes.setdefault(block.local, [0] * len(block.local_box))
            shapes[block.local] = [max(a, stop) for a, (_, stop) in zip(known, block.local_box, strict=True)]
        return {name: torch.zeros(shape) for name, shape in shapes.items()}

    def units(self, stage: int) -> dict[str, list[str]]:
        names = list(self._parameters[stage])
        if not (self.spec.tied and stage == self.stages - 1):
            return {f"stage {stage}": names}
        return {
            f"stage {stage}": [n for n in names if n != "output_layer.weight"],
            f"stage {stage} late": ["output_layer.weight"],
        }

    def _link(self, engine: RunningEngine, stage: int) -> EngineLink:
        return EngineLink(
            f"tcp://127.0.0.1:{engine.control}",
            NixlSender(f"publisher{stage}-{time.monotonic_ns()}"),
            rank=stage,
            world_size=self.stages,
            stage=stage,
            spec=self.spec,
            sources=self._blocks,
            units=self.units(stage),
            parameters=self._parameters[stage],
            deadline_s=60,
            start_deadline_s=60,
            events=EventLog(engine.run_dir / "events" / f"publisher{stage}.jsonl"),
        )

    def set_weights(self, stage: int, weights: HfWeights) -> None:
        """The optimizer step of one stage."""
        link = self._links[stage]
        for unit in self.units(stage):
            link.before_change(unit)
        for block in self._blocks[stage]:
            target = tuple(slice(*side) for side in block.local_box)
            source = tuple(slice(*side) for side in block.hf_box)
            self._parameters[stage][block.local][target] = weights[block.hf][source]

    def step(self, stage: int, version: int, attempt: int = 1, validate: bool = True) -> None:
        link = self._links[stage]
        for unit in self.units(stage):
            link.stepped(unit, version, attempt)
            if validate:
                link.validated(unit, version, attempt)

    def publish(self, version: int, weights: HfWeights) -> None:
        for stage in reversed(range(self.stages)):  # the last stage is done first
            self.set_weights(stage, weights)
            self.step(stage, version)
        self.version = version

    def check(self) -> None:
        for link in self._links:
            if link.error is not None:
                raise link.error

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.check()


def expected_checksums(spec: ModelSpec, weights: HfWeights, names: list[str]) -> dict[str, str]:
    """Digests of vLLM's parameters (`stage/name`) holding these weights, fp32, without padded rows."""
    found = {}
    for key in names:
        _, name = key.split("/")
        blocks = vllm_blocks(spec, [name])
        if not blocks:
            continue
        rows = max(block.local_box[0][1] for block in blocks)
        rest = hf_shapes(spec)[blocks[0].hf][1:]
        tensor = torch.zeros((rows, *rest))
        for block in blocks:
            tensor[tuple(slice(*side) for side in block.local_box)] = weights[block.hf][
                tuple(slice(*side) for side in block.hf_box)
            ]
        padded = -(-rows // 64) * 64 if blocks[0].hf in ("model.embed_tokens.weight", "lm_head.weight") else rows
        if padded > rows:
            tensor = torch.cat([tensor, torch.zeros((padded - rows, *rest))])
        found[key] = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    return found
