"""What our plugin needs to know inside vLLM's processes; travels in vLLM's `additional_config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_stream.observe.events import EventLog

_KEY = "megatron_stream"


@dataclass(frozen=True)
class EngineSettings:
    """`control_port`: where the commit coordinator listens (ZeroMQ), on `host`.

    `run_dir` receives event files; empty: none are written.
    """

    name: str = "engine"
    run_dir: str = ""
    host: str = "127.0.0.1"
    control_port: int = 0
    deadline_s: float = 60.0

    def additional_config(self) -> dict[str, Any]:
        return {_KEY: asdict(self)}

    @property
    def control_address(self) -> str:
        return f"tcp://{self.host}:{self.control_port}"

    def events(self, process: str) -> EventLog:
        return EventLog(Path(self.run_dir) / "events" / f"{self.name}-{process}.jsonl" if self.run_dir else None)


def settings_of(vllm_config: Any) -> EngineSettings:
    """The settings in a VllmConfig."""
    return EngineSettings(**(vllm_config.additional_config or {}).get(_KEY, {}))
