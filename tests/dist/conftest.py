from collections.abc import Iterator

import pytest

from megatron_stream.check.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """One pool for all tests here: importing Megatron-core costs more than what they do."""
    with Ranks() as pool:
        yield pool
