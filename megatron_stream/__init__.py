"""RL training whose weight updates stream, stage by stage, into the running inference engine."""

__version__ = "0.1.0"
