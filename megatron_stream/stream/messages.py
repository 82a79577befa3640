"""Control messages between trainer ranks, engine workers and the commit coordinator of an engine.

Small, typed and versioned; msgpack on ZeroMQ. Weights never travel here: they go over a lane. `PROTOCOL`
is in every first message, so that two releases that don't understand each other say so.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, tag_field="type", frozen=True):
    """Base of all messages. `request` pairs an answer with its question (0: no answer is expected)."""

    request: int = 0


class ParameterInfo(msgspec.Struct, frozen=True):
    """One parameter of an engine worker and where it lies in the worker's staging memory (bytes)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class WorkerInfo(msgspec.Struct, frozen=True):
    """An engine worker as it introduces itself: its stage, its parameters and how to write to it."""

    worker: int
    stage: int
    tensor_rank: int
    parameters: list[ParameterInfo]
    staging_bytes: int
    lane_address: bytes  # what the lane needs to reach the staging memory


class Hello(Message, tag="hello", frozen=True):
    """A trainer rank registers: the units it will send and the workers that each of them reaches."""

    protocol: int = PROTOCOL
    rank: int = 0
    world_size: int = 1
    units: dict[str, list[int]] = {}


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to a trainer's first message: who the workers are and which version is committed."""

    workers: list[WorkerInfo] = []
    committed: int = 0


class Attach(Message, tag="attach", frozen=True):
    """An engine worker's staging thread is ready."""

    protocol: int = PROTOCOL
    worker: int = 0


class Begin(Message, tag="begin", frozen=True):
    """May I overwrite the staging memory of `unit` with `version`? Answered by `Grant`."""

    unit: str = ""
    version: int = 0
    attempt: int = 0


class Grant(Message, tag="grant", frozen=True):
    """`write` False: a newer version is on its way, leave this one out."""

    write: bool = False


class Wrote(Message, tag="wrote", frozen=True):
    """Travels over the lane behind the bytes: all of this attempt is in the worker's staging memory."""

    unit: str = ""
    version: int = 0
    attempt: int = 0
    nbytes: int = 0
    started: float = 0.0  # seconds since the epoch at which the sender began to write


class Staged(Message, tag="staged", frozen=True):
    """A worker received the whole of a unit's version."""

    worker: int = 0
    unit: str = ""
    version: int = 0
    attempt: int = 0


class Validated(Message, tag="validated", frozen=True):
    """The global gradient norm accepted this attempt of the unit's version: it may be committed."""

    unit: str = ""
    version: int = 0
    attempt: int = 0


class Passed(Message, tag="passed", frozen=True):
    """The trainer stepped on before this unit's version was packed: it will never be sent."""

    unit: str = ""
    version: int = 0


class Committed(Message, tag="committed", frozen=True):
    """To every trainer rank: the engine computes with `version` from now on."""

    version: int = 0


class Leave(Message, tag="leave", frozen=True):
    """The sender goes away on purpose."""


class Failed(Message, tag="failed", frozen=True):
    """Something broke at the sender; the other side gives up what it was waiting for."""

    who: str = ""
    error: str = ""


AnyMessage = Hello | Welcome | Attach | Begin | Grant | Wrote | Staged | Validated | Passed | Committed | Leave | Failed

_decoder = msgspec.msgpack.Decoder(AnyMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError for anything that is not one of our messages."""
    return _decoder.decode(data)


_worker_decoder = msgspec.msgpack.Decoder(WorkerInfo)


def encode_worker(info: WorkerInfo) -> bytes:
    return _encoder.encode(info)


def decode_worker(data: bytes) -> WorkerInfo:
    return _worker_decoder.decode(data)
