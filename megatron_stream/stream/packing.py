"""Turning one rank's part of the plan into bytes: what goes into the send buffer, and where it lands."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_stream.layout.blocks import Box, extent
from megatron_stream.layout.plan import Copy, PlanError
from megatron_stream.stream.lane import Range
from megatron_stream.stream.messages import ParameterInfo, WorkerInfo

# Ranges closer than this in the receiver's memory are written as one; staging aligns parameters to 64 bytes.
_MERGE_GAP = 64


@dataclass
class Packing:
    """One unit's bytes for one worker. `pack` fills `buffer` (uint8) with what `ranges` will write."""

    buffer: torch.Tensor
    ranges: list[Range]
    sources: list[torch.Tensor] = field(repr=False)
    targets: list[torch.Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranges)

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the live parameters, in the engine's dtype and order."""
        torch._foreach_copy_(self.targets, self.sources)


def byte_range(info: ParameterInfo, box: Box, itemsize: int) -> tuple[int, int]:
    """(offset, length) in bytes of `box` of a parameter in staging memory.

    Raises PlanError if the box is not one contiguous range.
    """
    shape = extent(box)
    row = math.prod(info.shape[1:]) * itemsize
    if shape[1:] != info.shape[1:] or any(start for start, _ in box[1:]):
        raise PlanError(f"{info.name}{box}: only whole rows can be streamed in this release (engine TP > 1?)")
    return info.offset + box[0][0] * row, shape[0] * row


def make_packing(copies: Sequence[Copy], parameters: Mapping[str, torch.Tensor], worker: WorkerInfo) -> Packing:
    """Lay out the send buffer in the order of the worker's staging memory, in as few ranges as possible."""
    infos = {info.name: info for info in worker.parameters}
    placed = []
    for copy in copies:
        info = infos[copy.worker_name]
        dtype: torch.dtype = getattr(torch, info.dtype)
        offset, nbytes = byte_range(info, copy.worker_box, dtype.itemsize)
        placed.append((offset, nbytes, copy, dtype))
    placed.sort(key=lambda item: item[0])

    ranges: list[Range] = []
    views: list[tuple[int, int, Copy, torch.dtype]] = []
    size = 0
    for offset, nbytes, copy, dtype in placed:
        last = ranges[-1] if ranges else None
        gap = offset - (last.target + last.nbytes) if last else 0
        assert gap >= 0, f"{copy.worker_name} is written twice"
        if last and gap < _MERGE_GAP:
            ranges[-1] = last._replace(nbytes=last.nbytes + gap + nbytes)
            size += gap
        else:
            size += -size % _MERGE_GAP
            ranges.append(Range(size, offset, nbytes))
        views.append((size, nbytes, copy, dtype))
        size += nbytes

    device = next(iter(parameters.values())).device
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    sources, targets = [], []
    for start, nbytes, copy, dtype in views:
        index = tuple(slice(a, b) for a, b in copy.source_box)
        source = parameters[copy.source_name].detach()[index]
        sources.append(source)
        targets.append(buffer[start : start + nbytes].view(dtype).view(source.shape))
    return Packing(buffer, ranges, sources, targets)


def by_unit_and_worker(copies: Sequence[Copy], unit_of: Mapping[str, str]) -> dict[str, dict[int, list[Copy]]]:
    """Group one rank's copies: unit -> worker -> copies. `unit_of` names each parameter's unit."""
    grouped: dict[str, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        grouped[unit_of[copy.source_name]][copy.worker].append(copy)
    return {unit: dict(workers) for unit, workers in grouped.items()}
