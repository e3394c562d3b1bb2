from __future__ import annotations

import pytest

from inflight.config import EngineConfig
from inflight.frontend.engine_client.device_placement import engine_rank, placement


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


def test_engines_on_several_gpus_publish_kv_events_at_ports_of_their_own() -> None:
    groups = [{"kind": "KIND_GPU", "count": 2, "gpus": [3, 1]}, {"kind": "KIND_GPU", "gpus": [5]}, {"kind": "KIND_CPU"}]
    model_config = {"instance_group": groups}
    assert [engine_rank(model_config, "GPU", gpu) for gpu in (1, 3, 5)] == [0, 1, 2]
    assert engine_rank(model_config, "CPU", 0) == engine_rank({}, "GPU", 0) == 0
    config = EngineConfig.from_dict({"model": "m", "kv_events_config": {"data_parallel_rank": 4}})
    events = [placement(config, "GPU", gpu, None, rank)[0].kv_events_config for rank, gpu in enumerate((1, 3, 5))]
    assert [one and one.data_parallel_rank for one in events] == [4, 5, 6]
    assert placement(EngineConfig(model="m"), "GPU", 3, None, 1)[0].kv_events_config is None
