"""Ports of a run's parts on this machine."""

from __future__ import annotations

import socket

from megatron_stream.errors import UserError


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def choose_port(host: str, wanted: int, key: str) -> int:
    """`wanted`, or a free one if it is 0. Raises UserError when `wanted` is taken."""
    if wanted == 0:
        return free_port(host)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, wanted))
        except OSError as error:
            raise UserError(
                f"{key}={wanted} is in use on {host} ({error.strerror}); choose another, or 0 for a free one"
            ) from error
    return wanted
