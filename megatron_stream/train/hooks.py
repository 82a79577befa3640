"""Where Megatron's schedules tell us that gradients are final. No schedule is changed.

all           `config.finalize_model_grads_func`, after the rank's last backward
interleaved   `config.grad_sync_func`, a list: after each chunk's last backward (as many virtual microbatches
              late as the stage's rank, so that the stages' data-parallel traffic coincides)
one stage     a hook behind DDP's on each gradient accumulator: it sees that a bucket's reduction was started
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Detach = Callable[[], None]


class Reduced:
    """A chunk whose gradients are reduced already, for finalize_model_grads, which would reduce them again."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing is left to do."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


class GroupOfOne:
    """What finalize_model_grads takes for an embedding group without peers (it asks for the size only)."""

    def size(self) -> int:
        return 1


def attach_finalize(config: Any, hook: Callable[..., None]) -> Detach:
    """Raises ValueError when the loop finalizes gradients in its own way."""
    from megatron.core.distributed import finalize_model_grads

    theirs = config.finalize_model_grads_func
    if theirs is not None and getattr(theirs, "func", theirs) is not finalize_model_grads:
        raise ValueError(
            f"config.finalize_model_grads_func is {theirs!r}; per-stage stepping replaces Megatron's own function only"
        )
    config.finalize_model_grads_func = hook
    return partial(setattr, config, "finalize_model_grads_func", theirs)


def attach_chunks(config: Any, chunks: Sequence[Any], hook: Callable[[int], None]) -> Detach:
    """`hook(chunk)` for every chunk after its last backward; starts its reduction first, as stock would."""

    def done(index: int, parameters: Any) -> None:
        if chunks[index].ddp_config.overlap_grad_reduce:
            chunks[index].start_grad_sync()
        hook(index)

    theirs = config.grad_sync_func
    config.grad_sync_func = [partial(done, index) for index in range(len(chunks))]
    return partial(setattr, config, "grad_sync_func", theirs)


def attach_buckets(chunk: Any, hook: Callable[[Any], None]) -> Detach:
    """`hook(bucket_group)` once a bucket group's reduction has been started during a backward.

    In the very first step DDP reduces all buckets at the end (it counts its gradients first); there is no call
    then.
    """
    held = []  # the hooks live as long as their accumulators

    def seen(parameter: Any, *gradients: Any) -> None:
        group = chunk.param_to_bucket_group[parameter]
        if group.grad_reduce_handle is not None:
            hook(group)

    for parameter in chunk.module.parameters():
        if parameter.requires_grad:
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            held.append((accumulator, accumulator.register_hook(partial(seen, parameter))))

    def detach() -> None:
        for _, handle in held:
            handle.remove()
        held.clear()

    return detach
