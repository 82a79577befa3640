"""A lane: one trainer rank's path to one engine worker. The interface; one file a transport.

Bytes are written one-sidedly into memory that the receiver registered; a notice follows them and is seen by
the receiver only when all bytes are there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from megatron_stream.errors import RunError


class Range(NamedTuple):
    """Bytes `source` to `source + nbytes` of the sender's buffer go to `target` of the receiver's."""

    source: int
    target: int
    nbytes: int


class LaneError(RunError):
    """A transfer failed or did not end before its deadline; the message names both ends."""


class LaneReceiver(Protocol):
    """The engine worker's end of all its lanes."""

    @property
    def address(self) -> bytes:
        """What a sender needs to connect; opaque."""

    def poll(self) -> list[bytes]:
        """Notices that arrived since the last call. Does not wait."""

    def close(self) -> None: ...


class LaneSender(Protocol):
    """A trainer rank's end of all its lanes."""

    def connect(self, address: bytes) -> str:
        """Connect to a receiver; returns the name to write to."""

    def write(self, peer: str, buffer: torch.Tensor, ranges: list[Range], notice: bytes, deadline_s: float) -> None:
        """Write `ranges` of `buffer` (uint8, registered) to `peer`, then deliver `notice`. Blocks.

        Raises LaneError on failure or after `deadline_s` seconds.
        """

    def register(self, buffer: torch.Tensor) -> None:
        """Make `buffer` (contiguous) usable as a source of writes."""

    def close(self) -> None: ...
