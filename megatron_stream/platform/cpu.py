"""Megatron-core on CPUs with gloo.

Megatron-core names `torch.cuda` in many places although nothing that we use needs a GPU. `enable_cpu`
points those names at the CPU. It is called explicitly by a process that trains on CPUs, before
megatron.core is imported, never on import; on a machine with a GPU it refuses to run.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

# torch factory functions that Megatron-core calls with device="cuda" or device=<ordinal>.
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "linspace")


class _Stream:
    """A stream on a device without streams: everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event(_Stream):
    """An event that has always happened."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _OneGenerator:
    """`torch.cuda.default_generators` where every device is this CPU."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return call


def _type_naming_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type() without arguments answers as for a GPU tensor.

    megatron/core/optimizer/distrib_optimizer.py and clip_grads.py sort parameters by that string.
    """

    @functools.wraps(original)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not args and not kwargs:
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    return call


def _mixture_of_experts_on_cpu() -> None:
    """Two places in megatron/core/transformer/moe that only work with a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # moe_utils.py asks for a name that only its successful import of Transformer Engine defines.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # token_dispatcher.py makes lists of sizes from GPU tensors only.
    original = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def enable_cpu() -> None:
    """Make the rest of this process run Megatron-core on the CPU. A second call does nothing.

    Raises:
        RuntimeError: on a machine with a usable GPU, where it would hide the GPU.
    """
    if getattr(torch.cuda, "_megatron_stream_cpu", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError("enable_cpu() on a machine with a GPU would hide it; do not call it here")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda: Any = torch.cuda
    cuda._megatron_stream_cpu = True
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    # Not torch.manual_seed, which itself calls torch.cuda.manual_seed_all.
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    cuda.initial_seed = torch.initial_seed
    # megatron/core/tensor_parallel/random.py reads and sets the generator through the next two.
    cuda.default_generators = _OneGenerator()
    cuda._lazy_call = lambda call, **kwargs: call()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type_naming_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    _mixture_of_experts_on_cpu()  # last: it imports megatron.core
