"""Ports that parts are told about long before they bind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stream.errors import UserError
from megatron_stream.launch import ports
from megatron_stream.launch.ports import choose_port, choose_ports

pytestmark = pytest.mark.unit

HOST = "127.0.0.1"


def test_no_two_keys_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gave one port twice: the trainer's rendezvous sat on the engine's control port."""
    monkeypatch.setattr(ports, "_below_ephemeral", lambda: range(21_000, 21_200))
    chosen = choose_ports({str(key): (HOST, 0) for key in range(20)})
    assert len(set(chosen.values())) == 20


def test_a_wanted_port_is_kept_from_those_that_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = choose_port(HOST, 0, "first")
    monkeypatch.setattr(ports, "_below_ephemeral", lambda: range(wanted, wanted + 200))
    chosen = choose_ports({"any": (HOST, 0), "engine.port": (HOST, wanted)})
    assert chosen["engine.port"] == wanted != chosen["any"]


def test_no_outgoing_connection_can_take_a_chosen_port() -> None:
    """A peer that connects again and again to a port of the ephemeral range may get that very port as its own."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(choose_port(HOST, 0, "p") < first for _ in range(50))


def test_a_port_asked_for_twice_or_a_wrong_host() -> None:
    port = choose_port(HOST, 0, "p")
    with pytest.raises(UserError, match=rf"trainer.master_port={port} is in use"):
        choose_ports({"engine.port": (HOST, port), "trainer.master_port": (HOST, port)})
    with pytest.raises(UserError, match=r"engine.port: cannot listen on 192.0.2.1:80"):
        choose_port("192.0.2.1", 80, "engine.port")
    with pytest.raises(UserError, match="is the host name right"):
        choose_port("192.0.2.1", 0, "engine.port")
