from __future__ import annotations

import pytest

from inflight.config import EngineConfig
from inflight.frontend.engine_client.device_placement import placement


@pytest.mark.parametrize(
    ("kind", "device_id", "visible", "env"),
    [
        ("MODEL", 0, None, {}),
        ("GPU", 1, None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("GPU", 1, "4,GPU-7", {"CUDA_VISIBLE_DEVICES": "GPU-7"}),
        ("GPU", -1, None, {}),
        ("CPU", 0, None, {}),
    ],
)
def test_placement(kind: str, device_id: int, visible: str | None, env: dict[str, str]) -> None:
    config, found = placement(EngineConfig(model="m"), kind, device_id, visible)
    assert found == env
    assert config.device == ("cpu" if kind == "CPU" else "auto")
    assert placement(EngineConfig(model="m", device="cuda"), "CPU", 0, None)[0].device == "cuda"
