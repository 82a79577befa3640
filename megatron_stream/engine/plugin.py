"""What we add to vLLM, in every process of an engine (entry point `vllm.general_plugins`).

Three changes have no extension point and are therefore made here, and only here: the utility method
`EngineCore.stream_commit`, and on CPUs the switch that keeps linear weights in plain layout, so that they can be
written in place, and a shorter busy wait. All fail loudly when what they touch has changed.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

SUPPORTED_VLLM = "0.32."
BACKEND = "megatron_stream"
_SPIN_S = 0.001


def register() -> None:
    """Called by vLLM in the front end, the engine core and every worker; several times is fine."""
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        raise RuntimeError(
            f"megatron-stream supports vLLM {SUPPORTED_VLLM}x, found {vllm.__version__}; install that version"
        )
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "megatron_stream.engine.receiver", "StreamTransferEngine")
    _add_commit()
    if current_platform.is_cpu():
        _keep_plain_weights()
        _park_idle_readers()


def _park_idle_readers() -> None:
    """vLLM's processes spin for a second after each message, which suits a machine with cores to spare.

    On a small CPU machine the spinning pipeline stages take the cores from the trainer.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    defaults = SpinCondition.__init__.__defaults__
    assert defaults in ((1,), (_SPIN_S,)), f"vLLM's SpinCondition has other defaults now: {defaults}"
    SpinCondition.__init__.__defaults__ = (_SPIN_S,)


def _keep_plain_weights() -> None:
    """oneDNN prepacking replaces `layer.weight` by an opaque copy that cannot be updated in place."""
    from vllm import _custom_ops

    assert hasattr(_custom_ops, "_supports_onednn"), "vLLM no longer has _custom_ops._supports_onednn"
    _custom_ops._supports_onednn = False


def _add_commit() -> None:
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore, "stream_commit", None) is stream_commit:
        return
    for name in ("stream_commit", "_idle_state_callbacks"):
        assert not hasattr(EngineCore, name), f"vLLM's EngineCore has its own {name} now"
    EngineCore.stream_commit = stream_commit


def stream_commit(self: Any, version: int) -> Future[list[str]]:
    """Put a commit of `version` on the workers' queue, without waiting and without draining the pipeline.

    The engine core calls this between two steps, and every worker handles its queue in order: all stages
    switch between the same two batches (a wavefront). Results are read in that order too, so setting the
    label when the reply is read makes it exact, while requests that have not started yet are moved to the
    new prefix-cache salt at once. Resolves to one status per worker, "" where all is well.
    """
    future = self.model_executor.collective_rpc("stream_commit", args=(version,), non_block=True)
    self.scheduler.weights_change(version)

    def switched(done: Future[list[str]]) -> None:
        if done.exception() is None and not any(done.result()):
            self.set_weight_version(str(version))
            self.scheduler.label_version = version

    future.add_done_callback(switched)
    # An idle engine reads no replies: let it drain this one before it goes to sleep.
    self._idle_state_callbacks.append(lambda engine: future.result())
    return future
