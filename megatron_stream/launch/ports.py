"""Ports of a run's parts on this machine."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from megatron_stream.errors import UserError

_LOWEST = 10_000
_TRIES = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _below_ephemeral() -> range:
    """Ports that the kernel gives to nobody unasked.

    A port from its own range may be taken, before the part that it was chosen for binds it, by any outgoing
    connection - even by one that a waiting peer makes to that very port.
    """
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except OSError:
        first = 32_768
    return range(_LOWEST, first) if first > _LOWEST + 1000 else range(_LOWEST, 65_536)


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def choose_ports(wanted: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """A port for each key of `wanted` (key -> (host, port, or 0 for any free one)), no two the same.

    Raises UserError naming the key when its port is taken or asked for twice, or none is free.
    """
    chosen: dict[str, int] = {}
    with ExitStack() as held:  # all of them at once: the same one cannot be found free twice
        for key, (host, port) in sorted(wanted.items(), key=lambda item: item[1][1] == 0):
            if port:
                try:
                    held.enter_context(_bind(host, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise UserError(f"{key}: cannot listen on {host}:{port} ({error.strerror})") from error
                    raise UserError(f"{key}={port} is in use on {host}; choose another, or 0 for a free one") from error
                chosen[key] = port
                continue
            for candidate in random.sample(_below_ephemeral(), _TRIES):
                try:
                    held.enter_context(_bind(host, candidate))
                except OSError:
                    continue
                if candidate not in chosen.values():
                    chosen[key] = candidate
                    break
            else:
                raise UserError(f"no free port on {host} for {key}; is the host name right?")
    return chosen


def choose_port(host: str, wanted: int, key: str) -> int:
    """`choose_ports` for a single one."""
    return choose_ports({key: (host, wanted)})[key]
