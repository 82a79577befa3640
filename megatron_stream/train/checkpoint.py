"""What a trainer needs to go on after a stop: weights, optimizer state, version; loaded under any layout.

Megatron-core's distributed checkpointing, as Megatron's own training scripts use it: a folder `step-N`, written aside
and renamed when every rank has written, so that a half-written one never looks whole.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stream.errors import UserError
from megatron_stream.train.shards import chain_of

# Optimizer state in the shapes of the model's parameters: the form that any layout can load.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True)
class Progress:
    """`step` steps are done; the weights are those of `version`."""

    step: int
    version: int


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = [p for p in folder(run_dir).glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def save(run_dir: Path, progress: Progress, chunks: Sequence[Any], optimizer: Any) -> None:
    """Collective: every rank calls it. Older checkpoints are removed once the new one is whole.

    Megatron gathers the optimizer state over the data-parallel group and copies it: for a moment, up to 36 bytes of
    host memory for each parameter of the stage.

    `chunks`: the rank's model chunks in DDP; `optimizer`: Megatron's, or ours around it.
    """
    from megatron.core import dist_checkpointing

    target = folder(run_dir) / f"step-{progress.step}"
    aside = target.with_name(f".{target.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, is_loading=False)
    dist_checkpointing.save({**state, "progress": asdict(progress)}, str(aside), ("torch_dist", 1))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        for old in folder(run_dir).glob("step-*"):
            if old != target:
                shutil.rmtree(old)
    dist.barrier()


def load(path: Path, chunks: Sequence[Any], optimizer: Any) -> Progress:
    """Restore this rank; collective. Raises UserError when the checkpoint is of another model."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        found = dist_checkpointing.load(_sharded_state(chunks, optimizer, is_loading=True), str(path))
    except CheckpointException as error:  # torch's, with what each rank found
        why, _ = next(iter(error.failures.values()))
        raise UserError(f"{path} is not a checkpoint of this model: {why!s:.200}") from error
    except CheckpointingException as error:
        raise UserError(f"{path} is not a checkpoint of this model: {error!s:.200}") from error
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(found[_model_key(index)])
    for number, inner in enumerate(chain_of(optimizer)):
        _load_optimizer(inner, found["optimizer"][number], found["optimizer"][0])
    return Progress(**found["progress"])


def _model_key(index: int) -> str:
    return f"model{index}"  # the key says nothing about layers: their names are those of the whole model


def _sharded_state(chunks: Sequence[Any], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    model = {_model_key(i): chunk.module.sharded_state_dict(metadata=_METADATA) for i, chunk in enumerate(chunks)}
    chain = chain_of(optimizer)
    for inner in chain:
        _allocate_state(inner)
    optimizers = {n: inner.sharded_state_dict(model, is_loading, metadata=_METADATA) for n, inner in enumerate(chain)}
    return {**model, "optimizer": optimizers}


def _allocate_state(inner: Any) -> None:
    """What the first step would allocate, and with the same effect: Megatron reads it before there was a step."""
    if inner.init_state_fn is not None:
        inner.init_state_fn(inner.optimizer, inner.config)
    if isinstance(inner.optimizer, torch.optim.Adam):
        for state in inner.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


@torch.no_grad()
def _load_optimizer(inner: Any, state: dict[str, Any], first: dict[str, Any]) -> None:
    """As DistributedOptimizer.load_state_dict (0.16.1), but for torch's Adam, whose step count is one of the state's
    tensors: Megatron looks for it among the saved tensors, and would let all parameters share one counter.

    `first`: the state of the chain's first optimizer.
    """
    parameters = state.pop("param_state")
    if "optimizer" not in state:  # saved with ep=1, where experts have no optimizer of their own
        state = inner.state_dict()
        for group in state["optimizer"]["param_groups"]:
            if "step" in group:
                group["step"] = first["optimizer"]["param_groups"][0]["step"]
        if inner.grad_scaler is not None:
            state["grad_scaler"] = first["grad_scaler"]
    state.pop("param_state_sharding_type", None)
    inner.load_state_dict(state)
    steps = {p: s.pop("step") for p, s in inner.optimizer.state.items() if "step" in s}
    inner.load_parameter_state_from_fully_reshardable(parameters)
    for parameter, step in steps.items():
        inner.optimizer.state[parameter]["step"] = step.clone()
