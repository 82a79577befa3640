"""`megatron-stream rl`: start trainer, engine and actor on this machine, watch them, end them together."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_stream.config import RunConfig
from megatron_stream.engine.server import server_environment
from megatron_stream.errors import RunError, UserError
from megatron_stream.launch.parts import Part, end_parts, memory_gib
from megatron_stream.launch.ports import choose_ports
from megatron_stream.observe.live import LiveView
from megatron_stream.observe.report import write_reports

logger = logging.getLogger("megatron_stream")

_POLL_S = 0.5
_MEMORY_EVERY_S = 5.0
_GRACE_S = 15.0


class PartDied(RunError):
    """A part ended although the run was not over. The message names it and why."""


class _Interrupted(Exception):
    pass


@contextmanager
def _signals() -> Iterator[None]:
    def interrupt(number: int, frame: Any) -> None:
        raise _Interrupted(signal.Signals(number).name)

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare_run_dir(config: RunConfig) -> Path:
    """Make the run's folder. Raises UserError if it holds another run and `resume` is off."""
    run_dir = Path(config.dir)
    if run_dir.exists() and any(run_dir.iterdir()) and not config.resume:
        raise UserError(f"dir={config.dir} holds a run already; add resume=true to go on with it, or choose another")
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


class Supervisor:
    """The parts of one run. `config.model.path` must be a prepared folder by now."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.parts: dict[str, Part] = {}
        ports = choose_ports(
            {
                "engine.port": (config.engine.host, config.engine.port),
                "control": (config.engine.host, 0),
                "trainer.master_port": ("127.0.0.1", config.trainer.master_port),
            }
        )
        config.engine.port = ports["engine.port"]
        self._control_port, self._master_port = ports["control"], ports["trainer.master_port"]
        self.run_dir = prepare_run_dir(config)  # last of what a user's mistake can stop
        self.config_file = self.run_dir / "config.yaml"
        self.config_file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
        self._last_memory = 0.0

    @property
    def engine_url(self) -> str:
        return f"http://{self.config.engine.host}:{self.config.engine.port}"

    def _start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.parts[name] = Part(name, command, self.run_dir / "logs" / f"{name}.log", environment)

    def _start_all(self) -> None:
        """All at once: trainer and actor wait for the engine."""
        cli = [sys.executable, "-m", "megatron_stream.cli"]
        given = ["--config", str(self.config_file)]
        control = f"tcp://{self.config.engine.host}:{self._control_port}"
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._start(
            "engine",
            [*cli, "serve", *given, "--control-port", str(self._control_port)],
            server_environment(environment),
        )
        self._start(
            "trainer",
            [
                *[sys.executable, "-m", "torch.distributed.run"],
                f"--nproc-per-node={self.config.trainer.pipeline_parallel}",
                *["--master-addr=127.0.0.1", f"--master-port={self._master_port}"],
                *["-m", "megatron_stream.cli", "train-rl", *given, "--engine", control],
            ],
            environment,
        )
        self._start("actor", [*cli, "act", *given, "--engine-url", self.engine_url], environment)

    def run(self) -> None:
        """Until the trainer has done its steps. Raises PartDied, or UserError from a part."""
        view = LiveView(self.run_dir, self.config)
        try:
            with _signals(), view:
                view.parts = self._states
                self._start_all()
                while self.parts["trainer"].exit_code != 0:
                    self._watch(view)
        except _Interrupted as signal_name:
            print(f"interrupted ({signal_name}); ending trainer, engine and actor", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            end_parts(list(self.parts.values()), _GRACE_S)
            write_reports(self.run_dir, self.config.observe)

    def _watch(self, view: LiveView) -> None:
        for part in self.parts.values():
            part.tree()  # remember who belongs to it while its parent lives
            code = part.exit_code
            if code is not None and not (part.name == "trainer" and code == 0):
                self._explain(part, code)
        now = time.monotonic()
        if now - self._last_memory > _MEMORY_EVERY_S:
            self._last_memory = now
            line = json.dumps({"memory_gib": round(memory_gib(list(self.parts.values())), 3), "time": time.time()})
            with (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        view.refresh()
        time.sleep(_POLL_S)

    def _explain(self, part: Part, code: int) -> None:
        if mistake := part.mistake():
            raise UserError(f"the {part.name} could not go on: {mistake}")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = "\n".join(f"  {line[-300:]}" for line in part.error_lines(4))
        raise PartDied(f"the {part.name} ended ({how}) before the run was over; see {part.log}\n{why}")

    def _states(self) -> dict[str, str]:
        return {
            name: "running" if part.exit_code is None else f"ended ({part.exit_code})"
            for name, part in self.parts.items()
        }
