"""The engine worker's end: staging memory, arrivals in the background, and the copy at commit.

A backend of vLLM's weight-transfer API. vLLM makes it right after the model is loaded and before memory is
profiled, so that the KV cache is sized with the staging memory counted.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import zmq
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_stream.engine.settings import EngineSettings, settings_of
from megatron_stream.stream.messages import (
    Attach,
    Failed,
    Leave,
    ParameterInfo,
    Staged,
    WorkerInfo,
    Wrote,
    decode,
    encode,
)
from megatron_stream.stream.nixl_lane import NixlReceiver

_ALIGN = 64  # bytes; the vector width of the copy
_IDLE_POLL_S = 0.002


def staging_layout(parameters: dict[str, torch.Tensor]) -> tuple[list[ParameterInfo], int]:
    """Where each parameter lies in staging memory, in bytes, and the total size."""
    infos, offset = [], 0
    for name, parameter in parameters.items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        infos.append(ParameterInfo(name, tuple(parameter.shape), dtype, offset, parameter.nbytes))
        offset += -(-parameter.nbytes // _ALIGN) * _ALIGN
    return infos, offset


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that an update replaces, by name; tied ones once."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


class Staging:
    """A spare copy of the worker's parameters (uint8), and the views into it."""

    def __init__(self, parameters: dict[str, torch.Tensor], device: torch.device) -> None:
        self.infos, nbytes = staging_layout(parameters)
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.targets = list(parameters.values())
        self.views = [
            self.buffer[info.offset : info.offset + info.nbytes].view(target.dtype).view(target.shape)
            for info, target in zip(self.infos, self.targets, strict=True)
        ]

    @torch.no_grad()
    def commit(self) -> int:
        """Copy into the live parameters, in place: CUDA graphs have captured their addresses."""
        torch._foreach_copy_(self.targets, self.views)
        return sum(info.nbytes for info in self.infos)


class StreamInitInfo(WeightTransferInitInfo):
    """Nothing to exchange: the coordinator introduces trainer and workers."""


class StreamUpdateInfo(WeightTransferUpdateInfo):
    """Nothing to pass: weights arrive over the lanes."""


class StreamTransferEngine(WeightTransferEngine[StreamInitInfo, StreamUpdateInfo]):
    """Receives each unit's new weights in the background and commits them between two batches."""

    init_info_cls = StreamInitInfo
    update_info_cls = StreamUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.settings: EngineSettings = settings_of(vllm_config)
        self.rank: int = vllm_config.parallel_config.rank
        self.stage: int = get_pp_group().rank_in_group
        self.tensor_rank: int = get_tp_group().rank_in_group
        self.events = self.settings.events(f"worker{self.rank}")
        self.staging = Staging(trained_tensors(model), device)
        self._lane = NixlReceiver(f"{self.settings.name}-worker{self.rank}", self.staging.buffer)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="megatron-stream-staging", daemon=True)
        self._thread.start()

    def describe(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self.rank,
            stage=self.stage,
            tensor_rank=self.tensor_rank,
            parameters=self.staging.infos,
            staging_bytes=self.staging.buffer.nbytes,
            lane_address=self._lane.address,
        )

    def _receive(self) -> None:
        """Forward each unit's arrival to the coordinator until the engine shuts down."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(self.settings.control_address)
        socket.send(encode(Attach(worker=self.rank)))
        try:
            while not self._stop.is_set():
                notices = self._lane.poll()
                for notice in notices:
                    wrote = decode(notice)
                    assert isinstance(wrote, Wrote), f"unexpected notice {wrote}"
                    self.events.add(
                        f"staging stage {self.stage}",
                        "arrive",
                        wrote.started,
                        time.time(),
                        version=wrote.version,
                        unit=wrote.unit,
                        attempt=wrote.attempt,
                        bytes=wrote.nbytes,
                    )
                    staged = Staged(worker=self.rank, unit=wrote.unit, version=wrote.version, attempt=wrote.attempt)
                    socket.send(encode(staged))
                if not notices:
                    self._stop.wait(_IDLE_POLL_S)
            socket.send(encode(Leave()))
        except Exception as error:  # the thread must not die silently: the coordinator ends the update
            socket.send(encode(Failed(who=f"engine worker {self.rank}", error=repr(error))))
            raise
        finally:
            self._lane.close()
            socket.close()

    def init_transfer_engine(self, init_info: StreamInitInfo) -> None:
        """vLLM's handshake; ours is made by the coordinator when a trainer registers."""

    def start_weight_update(self) -> None:
        raise RuntimeError(_NOT_PAUSED)

    def finish_weight_update(self) -> None:
        raise RuntimeError(_NOT_PAUSED)

    def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        raise RuntimeError(_NOT_PAUSED)

    def shutdown(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self.events.close()


_NOT_PAUSED = (
    "this engine receives weights while it runs (megatron_stream); start/update/finish_weight_update belong to "
    "the pausing backends: start the server without --weight-transfer-config to use one of those"
)
