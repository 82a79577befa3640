"""A plain Megatron-core training loop that steps per stage: two lines of it are ours.

torchrun --nproc-per-node=2 examples/adopt/train.py
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_stream.platform.cpu import enable_cpu

if not torch.cuda.is_available():
    enable_cpu()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_stream  # 1 of 2

VOCABULARY, LENGTH, MICROBATCHES = 256, 16, 4


class Say(megatron_stream.StepListener):
    """The hook: what a publisher of weights would do at this moment is up to you."""

    def validated(self, unit: str, version: int, attempt: int) -> None:
        print(f"{unit}: version {version} is final and validated", flush=True)


def forward_step(data: Any, model: Any) -> Any:
    tokens = next(data)
    output = model(tokens, torch.arange(LENGTH).expand_as(tokens), None, labels=tokens.roll(-1, 1))
    return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def main(steps: int = 5) -> None:
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    stages = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        batch_p2p_comm=torch.cuda.is_available(),
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer: Any = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
    optimizer = megatron_stream.step_per_stage(optimizer, model, listener=Say())  # 2 of 2

    for step in range(steps):
        torch.manual_seed(step)
        batches = [torch.randint(0, VOCABULARY, (2, LENGTH)) for _ in range(MICROBATCHES)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        if losses:
            print(f"step {step} loss {sum(float(x['loss']) for x in losses) / len(losses):.3f} norm {norm:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
