"""Lanes over NIXL: one-sided writes (RDMA on InfiniBand/RoCE, shared memory or TCP elsewhere).

Agents must be dropped before the interpreter exits, or UCX can crash on the way out: call `close`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import msgspec
import torch

from megatron_stream.errors import UserError
from megatron_stream.stream.lane import LaneError, Range

_POLL_S = 0.001


class _Address(msgspec.Struct):
    agent: str
    metadata: bytes
    base: int
    nbytes: int
    device: int
    memory: str


def _new_agent(name: str) -> Any:
    # UCX would otherwise print its version and warnings into the training log.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for module in ("nixl_cu13._api", "nixl_cu12._api"):
        try:
            api = importlib.import_module(module)
        except ImportError:
            continue
        # NIXL's progress thread polls without a pause (a whole core on each side); both our ends poll anyway.
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    raise UserError("stream.lane=nixl needs the package nixl-cu12 or nixl-cu13: pip install 'megatron-stream[cpu]'")


def _errors_of(agent: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises: its exceptions have no common base."""
    bindings = sys.modules[type(agent.agent).__module__]
    return tuple(e for e in vars(bindings).values() if isinstance(e, type) and issubclass(e, Exception))


def _memory(buffer: torch.Tensor) -> tuple[str, int]:
    return ("VRAM", buffer.get_device()) if buffer.is_cuda else ("DRAM", 0)


class NixlReceiver:
    """Registers `buffer` (uint8, contiguous) for writes of any connected sender."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        self._agent = _new_agent(name)
        self._registered = self._agent.register_memory(buffer)
        memory, device = _memory(buffer)
        self._address = msgspec.msgpack.encode(
            _Address(name, self._agent.get_agent_metadata(), buffer.data_ptr(), buffer.nbytes, device, memory)
        )

    @property
    def address(self) -> bytes:
        return self._address

    def poll(self) -> list[bytes]:
        return [notice for notices in self._agent.get_new_notifs().values() for notice in notices]

    def close(self) -> None:
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None


class NixlSender:
    """Writes registered buffers of this process into receivers' memory."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._agent = _new_agent(name)
        self._errors = _errors_of(self._agent)
        self._peers: dict[str, _Address] = {}
        self._registered: list[Any] = []

    def register(self, buffer: torch.Tensor) -> None:
        self._registered.append(self._agent.register_memory(buffer))

    def connect(self, address: bytes) -> str:
        peer = msgspec.msgpack.decode(address, type=_Address)
        self._agent.add_remote_agent(peer.metadata)
        self._agent.make_connection(peer.agent)
        self._peers[peer.agent] = peer
        return peer.agent

    def write(self, peer: str, buffer: torch.Tensor, ranges: list[Range], notice: bytes, deadline_s: float) -> None:
        remote = self._peers[peer]
        for item in ranges:
            assert item.target >= 0 and item.target + item.nbytes <= remote.nbytes, f"{item} is outside {peer}"
        memory, device = _memory(buffer)
        local = [(buffer.data_ptr() + r.source, r.nbytes, device) for r in ranges]
        target = [(remote.base + r.target, r.nbytes, remote.device) for r in ranges]
        try:
            state = self._transfer(peer, (local, memory), (target, remote.memory), notice, deadline_s)
        except self._errors as error:
            state = f"{type(error).__name__}: {error}"
        if state != "DONE":
            raise LaneError(f"{self._name}: writing to {peer} failed ({state}); is that worker alive?")

    def _transfer(self, peer: str, local: Any, target: Any, notice: bytes, deadline_s: float) -> str:
        agent = self._agent
        descriptors = agent.get_xfer_descs(*local), agent.get_xfer_descs(*target)
        handle = agent.initialize_xfer("WRITE", *descriptors, peer, notice)
        deadline = time.monotonic() + deadline_s
        try:
            state: str = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise LaneError(f"{self._name}: writing to {peer} did not end within {deadline_s:g} s")
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        return state

    def close(self) -> None:
        if self._agent is None:
            return
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        for peer in self._peers:
            self._agent.remove_remote_agent(peer)
        self._agent = None
