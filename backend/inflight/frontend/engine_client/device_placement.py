"""The device that the engine of a Triton model instance runs on, and whether it shares that engine."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.config import EngineConfig
from inflight.engine.kv_events.endpoint import expect_room

__all__ = ["engine_rank", "num_engines", "num_sharing", "placement"]


def num_sharing(model_config: dict[str, Any], kind: str, device_id: int) -> int:
    """Number of instances of a model on this one's device, including itself: they share an engine process.

    Args:
        model_config: as Triton completes it.
        kind, device_id: as for `placement`.
    """
    groups = [group for group in model_config.get("instance_group", []) if group["kind"] == f"KIND_{kind}"]
    if kind == "GPU":
        groups = [group for group in groups if device_id in group.get("gpus", [])]
    return sum(group.get("count", 1) for group in groups)


def engine_rank(model_config: dict[str, Any], kind: str, device_id: int) -> int:
    """Which of the model's engines is this one's, in the order of their GPUs; arguments as for `num_sharing`."""
    gpus = _gpus(model_config)
    return gpus.index(device_id) if kind == "GPU" and device_id in gpus else 0


def num_engines(model_config: dict[str, Any]) -> int:
    """Number of the model's engines on GPUs; at least 1."""
    return max(1, len(_gpus(model_config)))


def _gpus(model_config: dict[str, Any]) -> list[int]:
    groups = [group for group in model_config.get("instance_group", []) if group["kind"] == "KIND_GPU"]
    return sorted({gpu for group in groups for gpu in group.get("gpus", [])})


def placement(
    config: EngineConfig, kind: str, device_id: int, visible_devices: str | None, rank: int = 0, engines: int = 1
) -> tuple[EngineConfig, dict[str, str]]:
    """Apply a model instance's kind to the configuration.

    Args:
        kind: "GPU", "CPU" or "MODEL", from Triton's `instance_group`.
        device_id: Triton's number of the GPU, counted among the devices that this process sees.
        visible_devices: `CUDA_VISIBLE_DEVICES` of this process.
        rank: of the engine among the model's; its KV events are published at another port.
        engines: of the model.

    Returns:
        The configuration ("auto" becomes "cpu" for KIND_CPU) and the environment of the engine process.

    Raises:
        ConfigError: the engines' KV events would need the same port.
    """
    if kind == "CPU" and config.device == "auto":
        return msgspec.structs.replace(config, device="cpu"), {}
    if kind != "GPU" or device_id < 0:
        return config, {}
    if (events := config.kv_events_config) is not None:
        expect_room(events, engines)
        events = msgspec.structs.replace(events, data_parallel_rank=events.data_parallel_rank + rank)
        config = msgspec.structs.replace(config, kv_events_config=events)
    visible = [entry.strip() for entry in (visible_devices or "").split(",") if entry.strip()]
    chosen = visible[device_id] if device_id < len(visible) else str(device_id)
    return config, {"CUDA_VISIBLE_DEVICES": chosen}
