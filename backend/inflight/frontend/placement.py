"""The device that the engine of a Triton model instance runs on."""

from __future__ import annotations

import msgspec

from inflight.config import EngineConfig

__all__ = ["placement"]


def placement(
    config: EngineConfig, kind: str, device_id: int, visible_devices: str | None
) -> tuple[EngineConfig, dict[str, str]]:
    """Apply a model instance's kind to the configuration.

    Args:
        kind: "GPU", "CPU" or "MODEL", from Triton's `instance_group`.
        device_id: Triton's number of the GPU, counted among the devices that this process sees.
        visible_devices: `CUDA_VISIBLE_DEVICES` of this process.

    Returns:
        The configuration ("auto" becomes "cpu" for KIND_CPU) and the environment of the engine process.
    """
    if kind == "CPU" and config.device == "auto":
        return msgspec.structs.replace(config, device="cpu"), {}
    if kind != "GPU" or device_id < 0:
        return config, {}
    visible = [entry.strip() for entry in (visible_devices or "").split(",") if entry.strip()]
    chosen = visible[device_id] if device_id < len(visible) else str(device_id)
    return config, {"CUDA_VISIBLE_DEVICES": chosen}
