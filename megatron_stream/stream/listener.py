"""What a stage optimizer tells about its units: the hook for whoever publishes weights."""

from __future__ import annotations


class StepListener:
    """Called by the training thread. Override what you need. Version: the one that the step makes."""

    def before_change(self, unit: str) -> None:
        """The unit's weights are about to be overwritten; returns when nobody reads them any more."""

    def stepped(self, unit: str, version: int, attempt: int) -> None:
        """The unit's weights are those of `version`, not yet validated: they may be sent, not committed."""

    def validated(self, unit: str, version: int, attempt: int) -> None:
        """The unit's weights of `version` are final: the gradients of all stages accepted this attempt."""
