"""Which parameters of a rank become final together: its units.

1F1B          `stage S`              after the stage's last backward
interleaved   `stage S chunk C`      after the chunk's last backward; the first chunk's with `stage S`
one stage     `stage 0 bucket B`     when the bucket's gradients are reduced, during the last backward; the last
                                     bucket's with `stage 0`
any           `stage S`              what is left when the schedule finishes the stage's gradients
any           `stage S late`         parameters whose gradient needs another stage (a tied embedding's copy)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_stream.train.shards import Shard


@dataclass
class Unit:
    """`key`: the chunk or the bucket group whose gradients end it early; None for what ends with the stage."""

    name: str
    shards: list[Shard]
    key: Any = None
    stepped: bool = False
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = sorted({shard.name for shard in self.shards})


@dataclass(frozen=True)
class Units:
    """`early` end before the stage does; `stage` and `late` may be empty."""

    early: list[Unit]
    stage: Unit
    late: Unit

    def all(self) -> list[Unit]:
        return [unit for unit in (*self.early, self.stage, self.late) if unit.shards]


def _reduced_over_tensor_parallel(shard: Shard, config: Any) -> bool:
    """Whether finalize_model_grads all-reduces this gradient over the tensor-parallel group.

    It does so for all chunks in one buffer, whose sums may depend on an element's place in it: those parameters
    end with the stage. The rule of _allreduce_non_tensor_model_parallel_grads (distributed/finalize_model_grads.py).
    """
    return (
        getattr(shard.param, "average_gradients_across_tp_domain", False)
        or (config.sequence_parallel and getattr(shard.param, "sequence_parallel", False))
        or (config.qk_layernorm and ("q_layernorm" in shard.name or "k_layernorm" in shard.name))
    )


def make_units(shards: Sequence[Shard], chunks: Sequence[Any], config: Any, groups: Any, exchange: bool) -> Units:
    """The units of this rank.

    `exchange`: gradients that need another stage are exchanged late; otherwise with the rest, as stock does.
    """
    stage, stages = groups.pp.rank(), groups.pp.size()
    late = _late_parameters(chunks, groups) if exchange else set()
    waits = set(late)
    for shard in shards:
        if groups.tp.size() > 1 and _reduced_over_tensor_parallel(shard, config):
            waits.add(id(shard.param))
        if config.defer_embedding_wgrad_compute and shard.name == "output_layer.weight":
            waits.add(id(shard.param))  # computed after the last backward (schedules.finish_embedding_wgrad_compute)
    keys: dict[int, Any] = {}  # parameter -> what ends it early
    if len(chunks) > 1:
        keys = {id(s.param): s.chunk for s in shards if s.chunk > 0}
    elif stages == 1 and chunks[0].ddp_config.overlap_grad_reduce:
        last = chunks[0].bucket_groups[-1]  # in the order of the backward: ends with the stage
        keys = {id(param): group for param, group in chunks[0].param_to_bucket_group.items() if group is not last}
    early: dict[int, Unit] = {}
    rest = Unit(f"stage {stage}", [])
    for shard in shards:
        if id(shard.param) in late:
            continue
        key = keys.get(id(shard.param))
        if key is None or id(shard.param) in waits:
            rest.shards.append(shard)
        elif len(chunks) > 1:
            early.setdefault(key, Unit(f"stage {stage} chunk {key}", [], key)).shards.append(shard)
        else:
            early.setdefault(id(key), Unit(f"stage {stage} bucket {len(early)}", [], key)).shards.append(shard)
    end = Unit(f"stage {stage} late", [s for s in shards if id(s.param) in late])
    for unit in (*early.values(), rest):
        unit.__post_init__()
    return Units(sorted(early.values(), key=lambda u: -u.key if len(chunks) > 1 else 0), rest, end)


def _late_parameters(chunks: Sequence[Any], groups: Any) -> set[int]:
    """Ids of this rank's parameters whose gradient is summed with another stage's, which ends later."""
    stage, stages = groups.pp.rank(), groups.pp.size()
    model = chunks[-1].module
    late = set()
    if stage == stages - 1 > 0 and model.share_embeddings_and_output_weights:
        late.add(id(model.shared_embedding_or_output_weight()))
    return late
