"""Which instances of a server share an engine, by name and device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shared_engine_rig import CONFIG

from inflight.config import EngineConfig
from inflight.frontend.engine_client.device_placement import num_sharing
from inflight.frontend.engine_client.shared_engine import find_group, group_name


def test_names_differ_by_server_model_and_configuration() -> None:
    name = group_name(CONFIG, {}, "/models/m/1", "m", "1")
    assert name == group_name(CONFIG, {}, "/models/m/1", "m", "1")
    others = [
        group_name(EngineConfig(model="fake", max_num_seqs=7), {}, "/models/m/1", "m", "1"),
        group_name(CONFIG, {"CUDA_VISIBLE_DEVICES": "1"}, "/models/m/1", "m", "1"),
        group_name(CONFIG, {}, "/models/m/2", "m", "2"),
    ]
    assert len({name, *others}) == 4
    assert len(f"\0{name}-15".encode()) < 108, "the length of a socket's address"


_GROUPS = [
    {"kind": "KIND_CPU", "count": 2},
    {"kind": "KIND_CPU", "count": 1},
    {"kind": "KIND_MODEL", "count": 1},
    {"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]},
    {"kind": "KIND_GPU", "count": 1, "gpus": [1]},
]


@pytest.mark.parametrize(
    ("kind", "device", "sharing"), [("CPU", 0, 3), ("MODEL", 0, 1), ("GPU", 0, 2), ("GPU", 1, 3), ("GPU", 2, 0)]
)
def test_instances_on_one_device_share(kind: str, device: int, sharing: int) -> None:
    assert num_sharing({"instance_group": _GROUPS}, kind, device) == sharing
    args = {
        "model_config": json.dumps({"instance_group": _GROUPS}),
        "model_instance_kind": kind,
        "model_instance_device_id": str(device),
        "model_name": "m",
        "model_version": "1",
        "model_instance_name": "m_0_0",
    }
    assert (find_group(CONFIG, {}, args, Path("/models/m/1")) is not None) == (sharing > 1)
