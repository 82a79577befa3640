"""What an engine must have computed: the generation replayed with HF transformers, version by version.

Token k was produced by a forward pass with the weights of its label; that pass also wrote the keys and values
of the position before it, which later passes keep (an update does not recompute them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_stream.rl.types import Completion
from tests.engine.running import HfWeights


class Replay:
    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._loaded: int | None = None

    def _load(self, version: int, weights: dict[int, HfWeights]) -> None:
        if version != self._loaded:
            self._model.load_state_dict(dict(weights[version]), strict=False)
            self._loaded = version

    @torch.no_grad()
    def logprobs(
        self,
        prompt: list[int],
        completion: Completion,
        versions: list[int],
        weights: dict[int, HfWeights],
        temperature: float,
    ) -> list[float]:
        """Log-probability of each token of `completion`, produced with `versions`."""
        cache: Any = None
        fed, found = prompt, []
        for token, version in zip(completion.token_ids, versions, strict=True):
            self._load(version, weights)
            output = self._model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(float((output.logits[0, -1] / temperature).log_softmax(-1)[token]))
            fed = [token]
        return found

    def error(
        self,
        prompt: list[int],
        completion: Completion,
        versions: list[int],
        weights: dict[int, HfWeights],
        temperature: float = 1.0,
    ) -> float:
        """Largest difference between the engine's log-probabilities and the replay's."""
        mine = self.logprobs(prompt, completion, versions, weights, temperature)
        return max(abs(a - b) for a, b in zip(mine, completion.logprobs, strict=True))
