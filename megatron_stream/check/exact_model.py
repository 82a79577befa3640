"""A small GPT model in a case's layout, with the same weights in every layout, from Megatron-core's own parts."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch

from megatron_stream.check.exact_case import Case
from megatron_stream.model.build import LLAMA_SETTINGS


class Norm(torch.nn.RMSNorm):
    """Megatron's own norm without Transformer Engine refuses sequence parallelism, although the maths is the same.

    The mark on the weight is what Megatron's fused norms set: its gradient is summed over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def make_config(case: Case, batch_p2p_comm: bool = False) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = getattr(torch, case.dtype)
    experts: dict[str, Any] = {}
    if case.experts:
        experts = {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_grouped_gemm": False,
            "moe_ffn_hidden_size": case.size.ffn,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=case.size.layers,
        hidden_size=case.size.hidden,
        ffn_hidden_size=case.size.ffn,
        num_attention_heads=case.size.heads,
        num_query_groups=case.size.kv_heads,
        **LLAMA_SETTINGS,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp if case.vp > 1 else None,
        sequence_parallel=case.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        variable_seq_lengths=case.variable_lengths,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        batch_p2p_comm=batch_p2p_comm,
        deallocate_pipeline_outputs=False,
        **experts,
    )


def make_chunks(case: Case, config: Any, groups: Any) -> list[Any]:
    """The rank's model chunks in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(num_experts=case.experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = [layer] * (case.size.layers // (case.pp * case.vp))
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
    chunks = []
    for index in range(case.vp):
        first = groups.pp.rank() == 0 and index == 0
        last = groups.pp.rank() == case.pp - 1 and index == case.vp - 1
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=case.size.vocabulary,
            max_sequence_length=512,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=index if case.vp > 1 else None,
        )
        _fill(model, case, groups)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=case.overlap,
            overlap_param_gather=case.overlap,
            bucket_size=20_000 if case.overlap else None,
        )
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0, pg_collection=groups))
    return chunks


@torch.no_grad()
def _fill(model: Any, case: Case, groups: Any) -> None:
    """Weights that depend on the place in the whole model only."""
    for name, parameter in model.named_parameters():
        whole = name
        if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
            whole = f"layer {model.decoder.layers[int(layer[1])].layer_number} {name[layer.end() :]}"
        if expert := re.search(r"local_experts\.(\d+)\.", whole):
            number = int(expert[1]) + groups.ep.rank() * (case.experts // case.ep)
            whole = whole.replace(expert[0], f"expert {number} ")
        if case.tied and name == "output_layer.weight":
            whole = "embedding.word_embeddings.weight"
        generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        split = parameter.tensor_model_parallel if hasattr(parameter, "tensor_model_parallel") else False
        ways = case.tp if split and "expert " not in whole else 1
        shape = list(parameter.shape)
        dim = parameter.partition_dim if ways > 1 else 0
        shape[dim] *= ways
        values = torch.randn(shape, generator=generator) * 0.05 + (1.0 if "norm" in name else 0.0)
        if ways > 1:
            rank = groups.tp.rank()
            if "linear_fc1" in name:  # gate above up, on each rank
                values = torch.cat([half.chunk(ways)[rank] for half in values.chunk(2)])
            else:
                values = values.chunk(ways, dim)[rank]
        parameter.copy_(values)
