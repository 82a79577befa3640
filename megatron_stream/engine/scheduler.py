"""vLLM's scheduler with a prefix cache that never mixes versions, and a record of every token."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from megatron_stream.engine.settings import settings_of


class StreamScheduler(Scheduler):
    """`weights_version` is what the next scheduled batch computes with; `label_version` what tokens get.

    Keys and values of a prompt are reused only by requests that start under the same version: the version
    is part of each request's cache salt.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights_version = 0
        self.label_version = 0
        self._events = settings_of(self.vllm_config).events("core")
        self._user_salts: dict[str, str] = {}

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._user_salts[request.request_id] = request.cache_salt or ""
            self._salt(request)
        super().add_request(request)

    def weights_change(self, version: int) -> None:
        """Batches scheduled from now on compute with `version`."""
        self.weights_version = version
        for request in self.requests.values():
            if request.status == RequestStatus.WAITING and request.num_computed_tokens == 0:
                self._salt(request)
        halfway = [r.request_id for r in self.running if 0 < r.num_computed_tokens < r.num_prompt_tokens]
        if halfway:
            self._events.instant("engine", "prefill across versions", requests=halfway, version=version)

    def _salt(self, request: Request) -> None:
        request.cache_salt = f"{self._user_salts[request.request_id]}@{self.weights_version}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._events.instant("engine", "preempted", requests=[request.request_id])

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._user_salts.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        requests = [
            output.request_id for client in outputs.values() for output in client.outputs for _ in output.new_token_ids
        ]
        if requests:
            self._events.instant("engine", "tokens", requests=requests, version=self.label_version)
        return outputs

    def shutdown(self) -> None:
        self._events.close()
        super().shutdown()
