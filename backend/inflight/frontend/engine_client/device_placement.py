"""The device that the engine of a Triton model instance runs on, and whether it shares that engine."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.config import EngineConfig

__all__ = ["engine_rank", "num_sharing", "placement"]


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
    if kind != "GPU":
        return 0
    groups = [group for group in model_config.get("instance_group", []) if group["kind"] == "KIND_GPU"]
    gpus = sorted({gpu for group in groups for gpu in group.get("gpus", [])})
    return gpus.index(device_id) if device_id in gpus else 0


def placement(
    config: EngineConfig, kind: str, device_id: int, visible_devices: str | None, rank: int = 0
) -> tuple[EngineConfig, dict[str, str]]:
    """Apply a model instance's kind to the configuration.

    Args:
        kind: "GPU", "CPU" or "MODEL", from Triton's `instance_group`.
        device_id: Triton's number of the GPU, counted among the devices that this process sees.
        visible_devices: `CUDA_VISIBLE_DEVICES` of this process.
        rank: of the engine among the model's; its KV events are published at another port.

    Returns:
        The configuration ("auto" becomes "cpu" for KIND_CPU) and the environment of the engine process.
    """
    if kind == "CPU" and config.device == "auto":
        return msgspec.structs.replace(config, device="cpu"), {}
    if kind != "GPU" or device_id < 0:
        return config, {}
    if config.kv_events_config is not None and rank:
        own = config.kv_events_config.data_parallel_rank + rank
        events = msgspec.structs.replace(config.kv_events_config, data_parallel_rank=own)
        config = msgspec.structs.replace(config, kv_events_config=events)
    visible = [entry.strip() for entry in (visible_devices or "").split(",") if entry.strip()]
    chosen = visible[device_id] if device_id < len(visible) else str(device_id)
    return config, {"CUDA_VISIBLE_DEVICES": chosen}
