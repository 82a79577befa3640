"""From source blocks and destination blocks to copies: who sends what to whom. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_stream.layout.blocks import Block, Box, intersect, numel, shift


@dataclass(frozen=True)
class Copy:
    """One box of a source parameter of trainer rank `source` goes to one box of a worker's parameter."""

    source: int
    source_name: str
    source_box: Box
    worker: int
    worker_name: str
    worker_box: Box


class PlanError(ValueError):
    """The trainer does not hold what an engine worker needs."""


def make_plan(sources: Mapping[int, Sequence[Block]], destinations: Mapping[int, Sequence[Block]]) -> list[Copy]:
    """Intersect what the trainer ranks hold with what the engine workers need.

    Every destination element is written exactly once per version. Where several ranks hold an element
    (a tied embedding), the rank that sends the most to that worker anyway sends it, so that a stage's
    bytes come from its co-indexed stage.

    Raises:
        PlanError: naming the HF tensor and the worker, where elements have no source.
    """
    by_tensor: dict[str, list[tuple[int, Block]]] = defaultdict(list)
    for rank, blocks in sources.items():
        for block in blocks:
            by_tensor[block.hf].append((rank, block))

    plan: list[Copy] = []
    for worker, blocks in destinations.items():
        sole: Counter[int] = Counter()
        for block in blocks:
            holders = {rank for rank, _ in by_tensor[block.hf]}
            if len(holders) == 1:
                sole[holders.pop()] += numel(block.hf_box)
        for block in blocks:
            copies = _copies_into(block, worker, by_tensor[block.hf], sole)
            written = sum(numel(c.worker_box) for c in copies)
            if written != numel(block.hf_box):
                raise PlanError(
                    f"engine worker {worker} needs {numel(block.hf_box)} elements of {block.hf}"
                    f"{block.hf_box}, the trainer ranks hold {written} of them"
                )
            plan += copies
    return plan


def _copies_into(block: Block, worker: int, held: Sequence[tuple[int, Block]], preference: Counter[int]) -> list[Copy]:
    """Copies that fill `block`: from the preferred rank what it has, the rest from the others."""
    copies: list[Copy] = []
    done: list[Box] = []
    for rank, source in sorted(held, key=lambda item: (-preference[item[0]], item[0])):
        common = intersect(source.hf_box, block.hf_box)
        if common is None or any(intersect(common, box) for box in done):
            continue
        done.append(common)
        copies.append(
            Copy(
                rank,
                source.local,
                shift(common, source.hf_box, source.local_box),
                worker,
                block.local,
                shift(common, block.hf_box, block.local_box),
            )
        )
    return copies
