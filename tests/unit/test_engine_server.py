"""How an engine is started."""

from __future__ import annotations

import pytest

from megatron_stream.engine.server import server_environment

pytestmark = pytest.mark.unit


def test_an_engine_does_not_take_a_launchers_variables_for_its_own() -> None:
    launcher = {
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "ROLE_RANK": "1"},
        **{"GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default"},
    }
    clean = server_environment({"LANG": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4"} | launcher)
    assert not clean.keys() & launcher.keys()
    assert (clean["LANG"], clean["CUDA_VISIBLE_DEVICES"], clean["OMP_NUM_THREADS"]) == ("C.UTF-8", "0,1", "4")
