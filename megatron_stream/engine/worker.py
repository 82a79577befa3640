"""The engine worker: commits a staged version between two batches and records what each batch computed with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from megatron_stream.engine.receiver import StreamTransferEngine
from megatron_stream.stream.messages import WorkerInfo, encode_worker

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StreamWorker(_Worker):
    """vLLM's worker of this platform with a commit and a record (`--worker-cls`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights_version = 0
        self._batch = 0  # batches with tokens; every worker counts the same ones
        self._sampling: tuple[int, int] | None = None

    @property
    def _stream(self) -> StreamTransferEngine:
        engine = self.weight_transfer_engine
        assert isinstance(engine, StreamTransferEngine), "start the engine with `megatron-stream serve`"
        return engine

    def stream_describe(self) -> bytes:
        info: WorkerInfo = self._stream.describe()
        return encode_worker(info)

    def stream_commit(self, version: int) -> str:
        """Switch to `version`, staged before. Returns "" or what went wrong: an exception here would leave
        the other workers' replies unread and end the engine."""
        try:
            start = time.time()
            nbytes = self._stream.staging.commit()
            self.weights_version = version
            self._stream.events.add(
                f"engine stage {self._stream.stage}",
                "commit",
                start,
                time.time(),
                version=version,
                bytes=nbytes,
                batch=self._batch,
            )
            return ""
        except Exception as error:
            return f"worker {self.rank}: {error!r}"

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens == 0:
            return super().execute_model(scheduler_output)
        batch, version, start = self._batch, self.weights_version, time.time()
        self._batch += 1
        self._sampling = (batch, version)
        result = super().execute_model(scheduler_output)
        self._stream.events.add(
            f"engine stage {self._stream.stage}",
            "forward",
            start,
            time.time(),
            batch=batch,
            version=version,
            tokens=tokens,
        )
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        result = super().sample_tokens(grammar_output)
        sampled = getattr(result, "sampled_token_ids", None)
        if sampled is not None and self._sampling is not None:
            batch, version = self._sampling
            requests = [r for r, ids in zip(result.req_ids, sampled, strict=True) for _ in ids]
            self._stream.events.instant(
                f"engine stage {self._stream.stage}", "sampled", batch=batch, version=version, requests=requests
            )
        return result
