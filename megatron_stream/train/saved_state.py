"""The exact copy of what an optimistic step changes, to take it back from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_stream.train.units import Unit

PLACES = ("device", "host")


def predicted_bytes(units: Sequence[Unit]) -> int:
    """Bytes of the copy for units that step early: each element that this rank owns has a main parameter and two
    moments of Adam's (4 bytes each); each shard has a step count (4, in torch's Adam)."""
    shards = [shard for unit in units for shard in unit.shards]
    return sum(12 * shard.main.numel() for shard in shards) + 4 * len(shards)


class SavedState:
    """Copies by unit, allocated at a unit's first save. `place`: device, or host (pinned when there is a GPU)."""

    def __init__(self, chain: Sequence[Any], place: str) -> None:
        self._chain = list(chain)
        self._place = place
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._fresh: dict[str, bool] = {}  # before the first step: there is no state

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for copies in self._copies.values() for t in copies)

    def save(self, unit: Unit) -> None:
        tensors = self._tensors(unit)
        copies = self._copies.get(unit.name, [])
        if [t.shape for t in tensors] != [t.shape for t in copies]:
            copies = self._copies[unit.name] = [self._like(t) for t in tensors]
        self._fresh[unit.name] = not any(self._state(shard.optimizer, shard.main) for shard in unit.shards)
        torch._foreach_copy_(copies, tensors, non_blocking=True)

    def restore(self, unit: Unit) -> None:
        """The unit's optimizer state and main parameters as at `save`."""
        if self._fresh[unit.name]:
            for shard in unit.shards:
                self._chain[shard.optimizer].optimizer.state.pop(shard.main, None)
        torch._foreach_copy_(self._tensors(unit), self._copies[unit.name], non_blocking=True)

    def _state(self, optimizer: int, main: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._chain[optimizer].optimizer.state.get(main, {})
        return state

    def _tensors(self, unit: Unit) -> list[torch.Tensor]:
        found = [shard.main.data for shard in unit.shards]
        for shard in unit.shards:
            found += [v for v in self._state(shard.optimizer, shard.main).values() if isinstance(v, torch.Tensor)]
        return found

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._place == "device" or tensor.device.type == "cpu":
            return torch.empty_like(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
