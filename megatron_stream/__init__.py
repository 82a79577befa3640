"""RL training whose weight updates stream, stage by stage, into the running inference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_stream.stream.listener import StepListener

if TYPE_CHECKING:
    from megatron_stream.train.stage_optimizer import StageOptimizer

__all__ = ["StepListener", "__version__", "step_per_stage"]
__version__ = "0.1.0"


def step_per_stage(optimizer: Any, model: Any, **settings: Any) -> StageOptimizer:
    """Make an existing Megatron-core loop step each pipeline stage as soon as its gradients are final.

    `optimizer`: from `get_megatron_optimizer`. `model`: the rank's DDP-wrapped chunk, or a list of them.
    `settings`: `stepping`, `listener`, `events`, `version` and `groups` of `StageOptimizer`. Keep the loop; call
    this after the optimizer is built, and set the learning rate before the schedule runs.

    Raises:
        ValueError: for a set-up in which the step could not be bitwise equal to stock.
    """
    from megatron_stream.train.adopt import step_per_stage as adopt

    return adopt(optimizer, model, **settings)
