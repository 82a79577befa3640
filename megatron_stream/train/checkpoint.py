"""What a trainer rank needs to go on after a stop: weights, optimizer state, version. Same layout only.

A checkpoint is a folder `step-N` with one file a rank; it is written aside and renamed when every rank has
written, so that a half-written one never looks whole.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stream.errors import UserError


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


def save(run_dir: Path, progress: Progress, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
    """Collective: every rank calls it. Older checkpoints are removed once the new one is whole."""
    target = folder(run_dir) / f"step-{progress.step}"
    aside = target.with_name(f".{target.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    torch.save(
        {
            "progress": progress,
            "world_size": dist.get_world_size(),
            "model": {name: p.detach() for name, p in model.named_parameters()},
            "main": [p.detach() for group in inner.param_groups for p in group["params"]],
            "optimizer": inner.state_dict()["state"],
        },
        aside / f"rank-{dist.get_rank()}.pt",
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        for old in folder(run_dir).glob("step-*"):
            if old != target:
                shutil.rmtree(old)
    dist.barrier()


@torch.no_grad()
def load(path: Path, model: torch.nn.Module, inner: torch.optim.Optimizer) -> Progress:
    """Restore this rank. Raises UserError when it was written with another number of ranks."""
    file = path / f"rank-{dist.get_rank()}.pt"
    if not file.exists():
        raise UserError(f"{path} has no {file.name}: it was written with another number of trainer ranks")
    saved: dict[str, Any] = torch.load(file, weights_only=False, mmap=True)
    if saved["world_size"] != dist.get_world_size():
        raise UserError(f"{path} was written by {saved['world_size']} ranks, this run has {dist.get_world_size()}")
    for name, parameter in model.named_parameters():
        parameter.copy_(saved["model"][name])
    mains = [p for group in inner.param_groups for p in group["params"]]
    for main, value in zip(mains, saved["main"], strict=True):
        main.copy_(value)
    state = {"state": saved["optimizer"], "param_groups": inner.state_dict()["param_groups"]}
    inner.load_state_dict(state)
    progress = saved["progress"]
    assert isinstance(progress, Progress)
    return progress
