"""The commit coordinator of one engine: the only place that decides what is written and what is committed.

It lives in the engine's API server process, speaks ZeroMQ with trainer ranks and engine workers, and follows
`stream.ledger`. A commit is one call of `EngineCore.stream_commit`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.engine.protocol import EngineClient

from megatron_stream.engine.settings import EngineSettings
from megatron_stream.errors import UserError
from megatron_stream.stream.ledger import Decision, Ledger
from megatron_stream.stream.messages import (
    PROTOCOL,
    Attach,
    Begin,
    Committed,
    Failed,
    Grant,
    Hello,
    Leave,
    Message,
    Passed,
    Staged,
    Validated,
    Welcome,
    WorkerInfo,
    decode,
    decode_worker,
    encode,
)

logger = logging.getLogger("vllm.megatron_stream")


class Coordinator:
    """`start`, then `run` serves until cancelled; `status` is what the HTTP endpoint shows."""

    def __init__(self, engine: EngineClient, settings: EngineSettings) -> None:
        self._engine: Any = engine
        self._settings = settings
        self._events = settings.events("coordinator")
        self._ledger = Ledger()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._trainers: dict[bytes, Hello] = {}
        self._waiting: list[tuple[bytes, Begin]] = []
        self._workers: list[WorkerInfo] = []
        self._commit: asyncio.Task[None] | None = None
        self._commits = 0
        self.error = ""

    async def start(self) -> None:
        """Listen, and ask the workers what they hold. Raises UserError when the port is taken."""
        try:
            self._socket.bind(self._settings.control_address)
        except zmq.ZMQError as error:
            raise UserError(f"the control port of the engine, {self._settings.control_address}: {error}") from error
        replies = await self._engine.collective_rpc("stream_describe")
        self._workers = [decode_worker(reply) for reply in replies]
        await self._engine.update_weight_version(str(self._ledger.committed))
        logger.info(
            "megatron_stream: coordinator on %s, %d workers, %.1f MB staging",
            self._settings.control_address,
            len(self._workers),
            sum(w.staging_bytes for w in self._workers) / 1e6,
        )

    async def run(self) -> None:
        try:
            while True:
                sender, payload = await self._socket.recv_multipart()
                try:
                    message = decode(payload)
                except msgspec.DecodeError as error:
                    await self._send(sender, Failed(who=self._settings.name, error=f"not our protocol: {error}"))
                    continue
                await self._handle(sender, message)
                await self._grant_waiting()
                self._maybe_commit()
        finally:
            if self._commit is not None:
                self._commit.cancel()
            self._socket.close()
            self._events.close()

    def status(self) -> dict[str, Any]:
        return {
            "name": self._settings.name,
            "control_address": self._settings.control_address,
            "ready": bool(self._workers),
            "committed": self._ledger.committed,
            "open": self._ledger.open,
            "commits": self._commits,
            "trainers": sorted(hello.rank for hello in self._trainers.values()),
            "workers": [
                {"worker": w.worker, "stage": w.stage, "staging_bytes": w.staging_bytes} for w in self._workers
            ],
            "error": self.error,
        }

    async def _send(self, to: bytes, message: Message) -> None:
        await self._socket.send_multipart([to, encode(message)])

    async def _handle(self, sender: bytes, message: Any) -> None:
        match message:
            case Hello() | Attach() if message.protocol != PROTOCOL:
                error = f"speaks protocol {message.protocol}, the engine {PROTOCOL}: install the same release"
                await self._send(sender, Failed(request=message.request, who=self._settings.name, error=error))
            case Hello():
                await self._register(sender, message)
            case Begin():
                self._waiting.append((sender, message))
            case Staged():
                self._ledger.staged(message.unit, message.worker, message.version, message.attempt)
            case Validated():
                self._ledger.validated(message.unit, message.version, message.attempt)
            case Passed():
                self._ledger.passed(message.version)
            case Leave():
                self._trainers.pop(sender, None)
                self._waiting = [(who, begin) for who, begin in self._waiting if who != sender]
            case Failed():
                await self._fail(f"{message.who}: {message.error}")
            case Attach():
                logger.info("megatron_stream: worker %d attached", message.worker)

    async def _register(self, sender: bytes, hello: Hello) -> None:
        self._trainers[sender] = hello
        for unit, workers in hello.units.items():
            self._ledger.register(unit, frozenset(workers))
        welcome = Welcome(request=hello.request, workers=self._workers, committed=self._ledger.committed)
        await self._send(sender, welcome)

    async def _grant_waiting(self) -> None:
        """Answer every Begin that can be answered, the newest version first."""
        if not self._all_registered():
            return
        still = []
        for sender, begin in sorted(self._waiting, key=lambda item: -item[1].version):
            decision = self._ledger.begin(begin.unit, begin.version, begin.attempt)
            if decision is Decision.WAIT:
                still.append((sender, begin))
            else:
                await self._send(sender, Grant(request=begin.request, write=decision is Decision.WRITE))
        self._waiting = still

    def _all_registered(self) -> bool:
        """Nothing is committed before every trainer rank has said which units it sends."""
        hellos = [hello for hello in self._trainers.values() if hello.units]
        return bool(hellos) and len({hello.rank for hello in hellos}) == hellos[0].world_size

    def _maybe_commit(self) -> None:
        version = self._ledger.ready()
        if version is None or not self._all_registered() or self.error:
            return
        self._events.instant("engine", "staged", version=version)
        self._ledger.commit_started(version)
        self._commit = asyncio.create_task(self._run_commit(version))

    async def _run_commit(self, version: int) -> None:
        with self._events.span("engine", "commit", version=version):
            try:
                statuses = await asyncio.wait_for(
                    self._engine.engine_core.call_utility_async("stream_commit", version),
                    self._settings.deadline_s,
                )
            except TimeoutError:
                statuses = [f"no reply within {self._settings.deadline_s:g} s"]
        problems = "; ".join(status for status in statuses if status)
        if problems:
            await self._fail(f"commit of version {version} on {self._settings.name}: {problems}")
            return
        self._ledger.commit_done(version)
        self._commits += 1
        for trainer in self._trainers:
            await self._send(trainer, Committed(version=version))
        await self._grant_waiting()
        self._maybe_commit()

    async def _fail(self, error: str) -> None:
        """Workers may hold different versions now: no commit any more, and every trainer is told."""
        self.error = error
        logger.error("megatron_stream: %s", error)
        for trainer in self._trainers:
            await self._send(trainer, Failed(who=self._settings.name, error=error))
