"""Per-stage stepping in somebody else's training loop; exported as `megatron_stream.step_per_stage`."""

from __future__ import annotations

from typing import Any

from megatron_stream.observe.events import EventLog
from megatron_stream.stream.listener import StepListener
from megatron_stream.train.stage_optimizer import StageOptimizer, Stepping


def step_per_stage(
    optimizer: Any,
    model: Any,
    *,
    stepping: Stepping | None = None,
    listener: StepListener | None = None,
    events: EventLog | None = None,
    version: int = 0,
    groups: Any = None,
) -> StageOptimizer:
    """See `megatron_stream.step_per_stage`. `groups`: Megatron's own where none are given."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    wrapped = StageOptimizer(optimizer, chunks, groups, stepping, listener=listener, events=events, version=version)
    wrapped.attach(chunks[0].config)
    return wrapped
