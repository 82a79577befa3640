"""A Megatron-core GPTModel stage from a model's HF description, and its weights from the HF checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_stream.errors import UserError
from megatron_stream.layout.blocks import Block
from megatron_stream.layout.llama import megatron_blocks
from megatron_stream.model.hf import ModelSpec, open_tensors
from megatron_stream.model.split import stage_layers

# TransformerConfig's settings of a Llama-like model, with nothing fused: what runs on every device.
LLAMA_SETTINGS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}


def transformer_config(spec: ModelSpec, pipeline: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Megatron-core's TransformerConfig for this model."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        layernorm_epsilon=spec.norm_eps,
        **LLAMA_SETTINGS,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, for dense models too
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every weight is loaded
        # On gloo the batched form swaps activations and gradients between two ranks (DESIGN 5.4).
        batch_p2p_comm=False,
    )


def build_stage(spec: ModelSpec, config: Any, groups: Any, max_sequence_length: int) -> torch.nn.Module:
    """This rank's stage, in training mode, not yet loaded."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stage, stages = groups.pp.rank(), groups.pp.size()
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=spec.vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        pg_collection=groups,
    )


def stage_blocks(spec: ModelSpec, pipeline: int, stage: int) -> list[Block]:
    """Where this stage's parameters lie in HF tensors."""
    first, count = stage_layers(spec, pipeline, stage)
    return megatron_blocks(spec, first, count, pre=stage == 0, post=stage == pipeline - 1)


@torch.no_grad()
def load_stage(model: torch.nn.Module, blocks: list[Block], folder: Path) -> None:
    """Copy the stage's weights from HF safetensors, tensor by tensor.

    Raises UserError naming a tensor of the model that the checkpoint lacks or the tables do not know.
    """
    parameters = dict(model.named_parameters())
    covered = {block.local for block in blocks}
    unknown = sorted(set(parameters) - covered)
    if unknown:
        raise UserError(f"no mapping from Hugging Face for the parameter {unknown[0]}")
    with open_tensors(folder) as tensors:
        for block in blocks:
            if block.hf not in tensors:
                raise UserError(f"{folder} has no tensor {block.hf}, which {block.local} needs")
            source = tensors.get(block.hf)
            index = tuple(slice(start, stop) for start, stop in block.hf_box)
            target = tuple(slice(start, stop) for start, stop in block.local_box)
            parameters[block.local][target].copy_(source[index])
