"""The cost of a step on a machine with a checkpoint: measured by `inflight calibrate`, or shipped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig, parse_bytes
from inflight.engine.policies.cost_model import StepCost

__all__ = ["FORMAT", "FitError", "Profile", "find_profile", "shipped_profiles"]

FORMAT = "inflight profile 1"
_SHIPPED = Path(__file__).parent / "profiles"


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative error of the fitted cost.

    Attributes:
        batches: number of loads that were measured.
        mean, worst: of the errors of their means.
    """

    batches: int
    mean: float
    worst: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Costs, the properties of the checkpoint that scheduling depends on, and their provenance.

    Attributes:
        name: value for `--profile`.
        options: keys of `model.json` used in the measurement; a simulation starts from them.
        num_blocks, bytes_per_block: of the KV pool.
        swap_seconds_per_block: seconds to copy a block to host memory and back.
        device: cost of executing a step on the device.
        host: cost of scheduling a step and processing its output on the host.
        fit: how well the costs match the measurement.
    """

    format: str = FORMAT
    name: str
    date: str
    machine: str
    versions: dict[str, str]
    checkpoint: str
    options: dict[str, Any]
    max_model_len: int
    vocab_size: int
    num_blocks: int
    bytes_per_block: int
    swap_seconds_per_block: float = 0.0
    device: StepCost
    host: StepCost
    fit: FitError

    def __post_init__(self) -> None:
        for cost in (self.device, self.host):
            knots = cost.tokens
            if not len(knots) == len(cost.seconds_at) > 0 or any(a >= b for a, b in itertools.pairwise(knots)):
                raise ValueError("a cost needs increasing `tokens` and as many `seconds_at`")

    def config(self, values: dict[str, Any], source: str = "command line") -> EngineConfig:
        """The engine's options: those of the measurement, overridden by `values`.

        Raises:
            ConfigError: as `EngineConfig.from_dict`, or a value for which the costs are not valid.
        """
        config = EngineConfig.from_dict({"model": self.checkpoint, **self.options, **values}, source=source)
        measured = EngineConfig.from_dict({"model": self.checkpoint, **self.options})
        for key in ("dtype", "device", "kv_cache_dtype", "cpu_threads", "attention_backend"):
            if getattr(config, key) not in ("auto", getattr(measured, key)):
                raise ConfigError(
                    f"{source}: {key}={getattr(config, key)!r}, but profile {self.name!r} was measured with "
                    f"{getattr(measured, key)!r}; leave it out, or run inflight calibrate --set {key}=..."
                )
        if (config.max_model_len or 0) > self.max_model_len:
            raise ConfigError(
                f"{source}: max_model_len={config.max_model_len} exceeds the {self.max_model_len} of profile "
                f"{self.name!r}; lower it, or calibrate with more"
            )
        if config.swap_bytes and not self.swap_seconds_per_block:
            raise ConfigError(
                f"{source}: swap_space={config.swap_space!r}, but profile {self.name!r} was measured without swapping; "
                "leave it out, or run inflight calibrate --set swap_space=..."
            )
        return config

    def blocks(self, config: EngineConfig) -> int:
        """Number of KV blocks of an engine with these options."""
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        scale = config.block_size / self.options.get("block_size", EngineConfig(model="").block_size)
        if config.kv_cache_memory is not None:
            return max(1, int(parse_bytes(config.kv_cache_memory) / (self.bytes_per_block * scale)))
        return max(1, int(self.num_blocks / scale))


def shipped_profiles() -> list[str]:
    """Names of the profiles in the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def find_profile(name: str) -> Profile:
    """A shipped profile by name, or a file that `inflight calibrate` wrote.

    Raises:
        ConfigError: no such profile, or the file is not one.
    """
    shipped = _SHIPPED / f"{name}.json"
    path = shipped if name in shipped_profiles() else Path(name)
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError:
        raise ConfigError(
            f"profile {name!r}: no such file, and not one of {', '.join(shipped_profiles())}; "
            "create one with inflight calibrate --model CHECKPOINT"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"profile {name!r}: not a profile: {error}; create one with inflight calibrate") from None
    if profile.format != FORMAT:
        raise ConfigError(f"profile {name!r}: format is {profile.format!r}, but this version reads {FORMAT!r}")
    return profile
