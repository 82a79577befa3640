"""The layouts and outcomes that `megatron-stream check exact` compares with stock Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

CLIPS = ("never", "some", "always", "inf")


@dataclass(frozen=True)
class Size:
    """A GPT model's shape."""

    layers: int = 8
    hidden: int = 32
    ffn: int = 48
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256


@dataclass(frozen=True)
class Case:
    """One training run of `steps` steps, by stock Megatron and by us.

    `clip`: on no step, on some, on all, or inf and nan in a gradient of the last stage on some steps.
    `overlap`: DDP's overlap_grad_reduce and overlap_param_gather.
    """

    pp: int = 1
    vp: int = 1
    tp: int = 1
    dp: int = 1
    tied: bool = False
    experts: int = 0
    ep: int = 1
    clip: str = "some"
    dtype: str = "float32"
    overlap: bool = False
    sequence_parallel: bool = False
    microbatches: int = 4
    steps: int = 20
    one_length: bool = False
    size: Size = Size()

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def variable_lengths(self) -> bool:
        """Interleaved, stock Megatron hangs on gloo (wrong sizes with two stages) when lengths differ."""
        return self.vp == 1 and not self.one_length

    @property
    def name(self) -> str:
        sizes = " ".join(f"{k}{getattr(self, k)}" for k in ("pp", "vp", "tp", "dp") if getattr(self, k) > 1)
        words = [sizes or "one process", "tied" if self.tied else "untied"]
        if self.experts:
            words.append(f"moe ep{self.ep}")
        words += [self.dtype] if self.dtype != "float32" else []
        words += ["overlap"] if self.overlap else []
        words += ["sp"] if self.sequence_parallel else []
        words += [f"{self.microbatches} microbatches"] if self.microbatches != 4 else []
        return f"{', '.join(words)}; clip {self.clip}"

    @property
    def possible(self) -> bool:
        """Whether Megatron-core has this combination, and it fits in four processes."""
        return (
            self.world <= 4
            and (self.vp == 1 or self.pp > 1)
            and self.ep <= self.dp * self.tp
            and (not self.experts or self.tp == 1 or self.sequence_parallel)  # Megatron asks for it
            and (not self.sequence_parallel or self.tp > 1)
        )


def full_grid() -> list[Case]:
    """Every combination of the layouts that fits, with every outcome, and the other dtypes and settings on some."""
    cases = []
    for pp, vp, tp, dp, tied, (experts, ep), clip in product(
        (1, 2, 4), (1, 2), (1, 2), (1, 2), (False, True), ((0, 1), (4, 1), (4, 2)), CLIPS
    ):
        case = Case(pp, vp, tp, dp, tied=tied, experts=experts, ep=ep, clip=clip)
        if experts and tp > 1:
            case = replace(case, sequence_parallel=True)
        cases.append(case)
    cases += list(_others())
    return [case for case in cases if case.possible]


def _others() -> Iterator[Case]:
    for clip in CLIPS:
        for dtype in ("bfloat16", "float16"):
            yield Case(pp=2, tied=True, clip=clip, dtype=dtype)
            yield Case(pp=2, vp=2, dp=2, clip=clip, dtype=dtype, overlap=True)
        yield Case(dp=2, tied=True, clip=clip, overlap=True)
        yield Case(dp=2, clip=clip, overlap=True, experts=4, ep=2)
        yield Case(pp=2, dp=2, clip=clip, overlap=True, tied=True)
        yield Case(pp=2, vp=2, dp=2, clip=clip, overlap=True, tied=True)
        yield Case(pp=2, tp=2, clip=clip, sequence_parallel=True, tied=True)
        yield Case(pp=2, vp=2, tp=2, clip=clip, sequence_parallel=True)
        yield Case(tp=2, dp=2, clip=clip, overlap=True, sequence_parallel=True)


def quick_grid() -> list[Case]:
    """Every axis at least once, every outcome on the layouts that differ most."""
    cases = [Case(pp=2, tied=True, clip=clip) for clip in CLIPS]
    cases += [Case(pp=2, vp=2, tied=True, clip=clip) for clip in CLIPS]
    cases += [
        Case(overlap=True),
        Case(dp=2, overlap=True, clip="inf"),
        Case(pp=4, tied=True),
        Case(pp=4, vp=2),
        Case(pp=2, tp=2, sequence_parallel=True),
        Case(pp=2, vp=2, tp=2, sequence_parallel=True, tied=True),
        Case(pp=2, vp=2, dp=2, overlap=True, tied=True),
        Case(pp=2, dp=2, tied=True),
        Case(pp=4, microbatches=2),
        Case(pp=2, dp=2, experts=4, ep=2),
        Case(pp=2, experts=4),
        Case(pp=2, dtype="bfloat16"),
        Case(pp=2, vp=2, dtype="float16", clip="inf"),
    ]
    return [replace(case, steps=10) for case in cases]
