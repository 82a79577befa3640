"""NIXL lanes between two processes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from megatron_stream.stream.lane import LaneError, Range
from megatron_stream.stream.nixl_lane import NixlReceiver, NixlSender

pytestmark = pytest.mark.dist


def _receive(connection: Connection) -> None:
    """Answers every notice with it and the bytes that are there."""
    memory = torch.zeros(16, dtype=torch.uint8)
    receiver = NixlReceiver("receiver", memory)
    connection.send(receiver.address)
    while True:
        for notice in receiver.poll():
            connection.send((notice, memory.tolist()))
        connection.poll(0.001)


def test_a_write_arrives_before_its_notice_and_a_dead_receiver_is_a_lane_error() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    sender = NixlSender("sender")
    try:
        buffer = torch.arange(8, dtype=torch.uint8)
        sender.register(buffer)
        assert ours.poll(60)
        peer = sender.connect(ours.recv())
        sender.write(peer, buffer, [Range(0, 8, 4), Range(4, 0, 2)], b"first", 30.0)
        assert ours.poll(30)
        assert ours.recv() == (b"first", [4, 5, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0])
        process.kill()
        process.join()
        with pytest.raises(LaneError, match="writing to receiver"):
            for _ in range(3):  # what the system took for a dead process still counts as written
                sender.write(peer, buffer, [Range(0, 0, 8)], b"second", 5.0)
    finally:
        process.kill()
        sender.close()
