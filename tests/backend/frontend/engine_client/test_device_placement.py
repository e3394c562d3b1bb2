from __future__ import annotations

import pytest

from inflight.config import ConfigError, EngineConfig
from inflight.engine.kv_events.endpoint import of_rank
from inflight.frontend.engine_client.device_placement import engine_rank, num_engines, placement


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
    assert num_engines(model_config) == 3 and num_engines({}) == 1
    own = {"enable_kv_cache_events": True, "data_parallel_rank": 4}
    own |= {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}
    config = EngineConfig.from_dict({"model": "m", "kv_events_config": own})
    addresses = []
    for rank, gpu in enumerate((1, 3, 5)):
        events = placement(config, "GPU", gpu, None, rank, 3)[0].kv_events_config
        assert events is not None and events.replay_endpoint is not None
        addresses += [of_rank(one, events.data_parallel_rank) for one in (events.endpoint, events.replay_endpoint)]
    assert addresses == [f"tcp://*:{port}" for port in (5561, 6561, 5562, 6562, 5563, 6563)]
    assert placement(EngineConfig(model="m"), "GPU", 3, None, 1)[0].kv_events_config is None


@pytest.mark.parametrize(
    ("replay_port", "engines", "meet"), [(5558, 2, True), (5556, 2, True), (5559, 2, False), (5558, 1, False)]
)
def test_engines_whose_kv_events_would_meet_at_a_port_are_refused(replay_port: int, engines: int, meet: bool) -> None:
    own = {"endpoint": "tcp://*:5557", "replay_endpoint": f"tcp://*:{replay_port}", "enable_kv_cache_events": True}
    config = EngineConfig.from_dict({"model": "m", "kv_events_config": own})
    for rank in range(engines):  # the first one, too: else its port would be another's
        if meet:
            with pytest.raises(
                ConfigError, match=f"ports 5557 and {replay_port} of 2 engines .* such as 5557 and 6557"
            ):
                placement(config, "GPU", rank, None, rank, engines)
        else:
            placement(config, "GPU", rank, None, rank, engines)
    off = EngineConfig.from_dict({"model": "m", "kv_events_config": {**own, "enable_kv_cache_events": False}})
    placement(off, "GPU", 0, None, 0, engines)
