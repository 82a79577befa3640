"""The trainer's end of the control channel to one engine. Used by one thread only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from megatron_stream.stream.lane import LaneError
from megatron_stream.stream.messages import Failed, Message, decode, encode

_POLL_MS = 5


class ControlClient:
    """Sends messages to the coordinator at `address`; `on_event` gets what it says unasked."""

    def __init__(self, address: str, on_event: Callable[[Any], None]) -> None:
        self.address = address
        self._on_event = on_event
        self._requests = itertools.count(1)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def ask(self, message: Message, deadline_s: float, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Send and wait for the answer, calling `meanwhile` every few milliseconds.

        Raises LaneError when the engine reports a failure, or does not answer within `deadline_s` seconds.
        """
        number = next(self._requests)
        self.send(msgspec.structs.replace(message, request=number))
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            meanwhile()
            if not self._socket.poll(_POLL_MS):
                continue
            answer = decode(self._socket.recv())
            if isinstance(answer, Failed):
                raise LaneError(f"{answer.who} reports: {answer.error}")
            if answer.request == number:
                return answer
            self._on_event(answer)
        raise LaneError(f"the engine at {self.address} did not answer {type(message).__name__} within {deadline_s:g} s")

    def poll(self) -> None:
        """Handle what has arrived. Raises LaneError when the engine reports a failure."""
        while self._socket.poll(0):
            message = decode(self._socket.recv())
            if isinstance(message, Failed):
                raise LaneError(f"{message.who} reports: {message.error}")
            self._on_event(message)

    def close(self) -> None:
        self._socket.close()
