"""When stepping before the norm is known pays: decided by the measured rate of rollbacks. Pure."""

from __future__ import annotations

from collections import deque


class Optimism:
    """`on` says whether the next step is taken before the verdict.

    Where clipping nearly always triggers, optimistic steps are done twice. After `window` steps of which more
    than half would have been rolled back, steps wait for the verdict (as stock Megatron's do); when it is less
    than a quarter they don't any more. Every rank sees the same verdicts, and so decides alike.
    """

    def __init__(self, window: int = 16) -> None:
        self.on = True
        self._rejected: deque[bool] = deque(maxlen=window)

    @property
    def rejection_rate(self) -> float:
        """Share of the last steps whose unclipped step the norm did not accept."""
        return sum(self._rejected) / len(self._rejected) if self._rejected else 0.0

    def record(self, accepted: bool) -> bool:
        """Note a verdict. True when `on` changed."""
        self._rejected.append(not accepted)
        if len(self._rejected) < (self._rejected.maxlen or 0):
            return False
        limit = 0.5 if self.on else 0.25
        on = self.rejection_rate <= limit
        changed, self.on = on != self.on, on
        return changed
