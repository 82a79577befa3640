"""How a model's layers are split over the trainer's pipeline stages."""

from __future__ import annotations

from megatron_stream.errors import UserError
from megatron_stream.model.hf import ModelSpec


def check_engine_stages(spec: ModelSpec, pipeline: int) -> None:
    """vLLM splits layers as it likes, but each stage needs one. Raises UserError when there are too few."""
    if pipeline > spec.num_layers:
        raise UserError(f"engine.pipeline_parallel={pipeline} is more stages than the model's {spec.num_layers} layers")


def stage_layers(spec: ModelSpec, pipeline: int, stage: int) -> tuple[int, int]:
    """(first layer, number of layers) of a pipeline stage: Megatron-core's even split.

    Raises UserError when the layers do not divide.
    """
    if pipeline > spec.num_layers:
        raise UserError(
            f"trainer.pipeline_parallel={pipeline} is more stages than the model's {spec.num_layers} layers"
        )
    if spec.num_layers % pipeline:
        raise UserError(
            f"the model's {spec.num_layers} layers do not divide over trainer.pipeline_parallel={pipeline} "
            f"stages; choose a divisor of {spec.num_layers}"
        )
    count = spec.num_layers // pipeline
    return stage * count, count
