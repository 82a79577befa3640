"""The trainer of an RL run: one process a rank, started by torchrun (`megatron-stream train-rl`)."""

from __future__ import annotations

import logging
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stream.config import RunConfig
from megatron_stream.model.build import build_stage, load_stage, stage_blocks, transformer_config
from megatron_stream.model.hf import ModelSpec, read_spec
from megatron_stream.model.split import stage_layers
from megatron_stream.observe.events import EventLog
from megatron_stream.observe.metrics import Metrics
from megatron_stream.platform.quiet import quiet_megatron
from megatron_stream.rl.batch import Batch, build_microbatches
from megatron_stream.rl.samples import SqliteSampleStream, stream_path
from megatron_stream.rl.types import Group
from megatron_stream.stream.nixl_lane import NixlSender
from megatron_stream.stream.sender import EngineLink, Sender
from megatron_stream.train import checkpoint
from megatron_stream.train.optimizer import build_optimizer, learning_rate, wrap_ddp
from megatron_stream.train.parallel import finalize, initialize
from megatron_stream.train.stage_optimizer import StageOptimizer, Stepping
from megatron_stream.train.step import LossSettings, run_schedule
from megatron_stream.train.timers import EventTimers

logger = logging.getLogger("megatron_stream.trainer")

# How long the trainer waits for enough samples before it says that the actor is not delivering.
SAMPLES_DEADLINE_S = 1800.0


class Trainer:
    """Builds this rank's stage, joins the engines, and trains until `config.trainer.steps` are done."""

    def __init__(self, config: RunConfig, model_path: Path, engines: list[str]) -> None:
        self.config = config
        self.run_dir = Path(config.dir)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.groups: Any = initialize(config.trainer.pipeline_parallel, device=device, seed=config.seed)
        self.rank = dist.get_rank()
        self.stage: int = self.groups.pp.rank()
        self.events = EventLog(self.run_dir / "events" / f"trainer{self.rank}.jsonl")
        self.track = f"trainer stage {self.stage}"

        self.spec: ModelSpec = read_spec(model_path)
        stages = config.trainer.pipeline_parallel
        stage_layers(self.spec, stages, self.stage)
        dtype: torch.dtype = getattr(torch, config.trainer.dtype)
        model_config = transformer_config(self.spec, stages, dtype, device)
        self.model = build_stage(self.spec, model_config, self.groups, config.engine.max_model_len)
        load_stage(self.model, stage_blocks(self.spec, stages, self.stage), model_path)
        self.ddp = wrap_ddp(self.model, model_config, self.groups)
        megatron = build_optimizer(config.trainer.optimizer, [self.ddp], dtype, self.groups)
        self.timers = EventTimers(self.events, self.track)
        model_config.timers = self.timers

        self.progress = checkpoint.Progress(step=0, version=0)
        if config.resume and (path := checkpoint.latest(self.run_dir)):
            self.progress = checkpoint.load(path, [self.ddp], megatron)
            logger.info("resumed from %s: step %d, version %d", path, self.progress.step, self.progress.version)

        self.optimizer = StageOptimizer(
            megatron,
            [self.ddp],
            self.groups,
            Stepping(mode=config.trainer.optimizer.stepping),
            events=self.events,
            version=self.progress.version,
        )
        self.optimizer.attach(model_config)
        self.sender = self._join(engines)
        self.optimizer.listener = self.sender
        self.samples = SqliteSampleStream(stream_path(self.run_dir)) if self.rank == 0 else None
        last = self.rank == dist.get_world_size() - 1
        self.metrics = Metrics(self.run_dir, config.observe) if last else None

    def _join(self, engines: list[str]) -> Sender:
        """One link to each engine; every rank describes all ranks' shards, so that all make the same plan."""
        stages = self.config.trainer.pipeline_parallel
        sources = {
            dist.get_global_rank(self.groups.pp, stage): stage_blocks(self.spec, stages, stage)
            for stage in range(stages)
        }
        parameters = {name: p.data for name, p in self.model.named_parameters()}
        units = {unit.name: unit.names for unit in self.optimizer.units.all()}
        links = [
            EngineLink(
                address,
                NixlSender(f"trainer{self.rank}-to-{index}"),
                rank=self.rank,
                world_size=dist.get_world_size(),
                stage=self.stage,
                spec=self.spec,
                sources=sources,
                units=units,
                parameters=parameters,
                deadline_s=self.config.stream.deadline_s,
                start_deadline_s=self.config.engine.start_deadline_s,
                events=self.events,
            )
            for index, address in enumerate(engines)
        ]
        return Sender(links)

    def publish_current(self) -> None:
        """Send the weights as they are: an engine that loaded version 0 follows a resumed trainer."""
        for unit in self.optimizer.units.all():
            self.sender.stepped(unit.name, self.progress.version, 0)
            self.sender.validated(unit.name, self.progress.version, 0)

    def run(self) -> None:
        if self.progress.version > 0:
            self.publish_current()
        if self.samples is not None:
            self.samples.rewind(self.progress.step)
        steps = self.config.trainer.steps
        while self.progress.step < steps:
            self._step()
            self.sender.check()
            every = self.config.trainer.save_every
            if self.progress.step == steps or (every and self.progress.step % every == 0):
                checkpoint.save(self.run_dir, self.progress, [self.ddp], self.optimizer)

    def _step(self) -> None:
        step = self.progress.step
        waited = time.monotonic()
        groups = self._claim(step)
        waited = time.monotonic() - waited
        algorithm = self.config.algorithm
        batch = build_microbatches(
            groups,
            self.config.trainer.micro_batch_size,
            self.spec.pad_id,
            self.groups.dp.rank(),
            self.groups.dp.size(),
            current_version=self.optimizer.version,
            normalize_std=algorithm.normalize_std,
        )
        lr = learning_rate(self.config.trainer.optimizer, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        started = time.monotonic()
        self.timers.start_step(self.optimizer.version + 1)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        settings = LossSettings(self.config.actor.sampling.temperature, algorithm.clip_low, algorithm.clip_high)
        losses = run_schedule(self.ddp, batch, settings, self.groups)
        changed, norm, _ = self.optimizer.step()
        self.events.instant(self.track, "step ready", version=self.timers.version)
        if not changed:
            logger.warning("step %d skipped: the gradient norm is %s", step, norm)
        self.progress = checkpoint.Progress(step + 1, self.optimizer.version)
        self._report(batch, losses, lr, norm, waited, time.monotonic() - started)

    def _claim(self, step: int) -> list[Group]:
        """The step's groups, the same on every rank: rank 0 takes them from the sample stream."""
        message: list[Any] = [None]
        if self.samples is not None:
            groups = self.samples.claim(
                self.config.algorithm.groups_per_step,
                step + 1,
                self.optimizer.version - self.config.algorithm.max_lag_versions,
                SAMPLES_DEADLINE_S,
                self.sender.check,
            )
            message = [[group.to_json() for group in groups]]
        dist.broadcast_object_list(message, src=0)
        return [Group.from_json(data) for data in message[0]]

    def _report(
        self, batch: Batch, losses: dict[str, float], lr: float, norm: float | None, waited: float, took: float
    ) -> None:
        if self.metrics is None:
            return
        self.events.instant(
            "trainer",
            "consumed",
            version=self.optimizer.version,
            lag_mean=batch.lag.mean,
            lag_max=batch.lag.max,
            reward=batch.reward_mean,
        )
        self.metrics.log(
            self.progress.step,
            reward=batch.reward_mean,
            grad_norm=norm,
            lr=lr,
            tokens=batch.num_tokens,
            lag_mean=batch.lag.mean,
            lag_max=batch.lag.max,
            version=self.optimizer.version,
            version_committed=self.sender.committed,
            rollbacks=self.optimizer.rollbacks,
            wait_samples_s=waited,
            step_s=took,
            trainer_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            **losses,
        )

    def close(self) -> None:
        self.sender.close()
        if self.metrics is not None:
            self.metrics.close()
        self.events.close()


def train_rl(config: RunConfig, model_path: Path, engines: list[str]) -> None:
    """Entry of one trainer rank. `engines`: control addresses (`tcp://host:port`)."""
    quiet_megatron()
    if not torch.cuda.is_available():
        from megatron_stream.platform.cpu import enable_cpu

        enable_cpu()
    trainer = Trainer(config, model_path, engines)
    try:
        trainer.run()
    finally:
        trainer.close()
    trainer.sender.check()
    finalize()
