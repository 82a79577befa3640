"""A worker that breaks the wavefront on purpose: later stages switch one batch late."""

from typing import Any

from megatron_stream.engine.worker import StreamWorker


class LateWorker(StreamWorker):
    _postponed: int | None = None

    def stream_commit(self, version: int) -> str:
        if self._stream.stage == 0:
            return super().stream_commit(version)
        self._postponed = version
        return ""

    def execute_model(self, scheduler_output: Any) -> Any:
        result = super().execute_model(scheduler_output)
        if self._postponed is not None and scheduler_output.total_num_scheduled_tokens:
            version, self._postponed = self._postponed, None
            super().stream_commit(version)
        return result
