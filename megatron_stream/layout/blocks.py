"""Who holds which element: shards as sets of blocks of Hugging Face tensors. Pure data.

A block says that the elements of one box of an HF tensor lie, in the same order and without transposition,
in one box of a local tensor (a Megatron parameter, a vLLM parameter, a file). A permutation of rows, such
as Megatron's query groups, is several blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# ((start, stop), ...) for each dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """Elements `hf_box` of the HF tensor `hf` lie in `local_box` of the local tensor `local`."""

    hf: str
    hf_box: Box
    local: str
    local_box: Box

    def __post_init__(self) -> None:
        assert extent(self.hf_box) == extent(self.local_box), f"{self}: boxes differ in shape"


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    return math.prod(extent(box))


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def rows(start: int, stop: int, shape: tuple[int, ...]) -> Box:
    """Rows `start` to `stop` of a tensor of `shape`, all other dimensions whole."""
    return ((start, stop), *((0, n) for n in shape[1:]))


def intersect(a: Box, b: Box) -> Box | None:
    """The common box, or None when it is empty."""
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return common if all(s < e for s, e in common) else None


def shift(box: Box, origin: Box, target: Box) -> Box:
    """`box`, a part of `origin`, moved to where `origin` lies in `target`."""
    return tuple((t + s - o, t + e - o) for (s, e), (o, _), (t, _) in zip(box, origin, target, strict=True))
