from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stream.model.prepare import resolve_model
from tests.engine.running import RunningEngine


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Tied embeddings: the last stage has a late unit."""
    return resolve_model("tiny")


@pytest.fixture(scope="session")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One PP=2 engine for all tests that don't break it; versions only grow."""
    running = RunningEngine(tiny, tmp_path_factory.mktemp("engine"))
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()
