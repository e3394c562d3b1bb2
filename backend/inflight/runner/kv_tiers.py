"""The KV tiers of a loaded model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from inflight.config import ConfigError, EngineConfig
from inflight.engine.tiers.base import KVBlocks
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import MOST_IN_HAND, Tier
from inflight.engine.tiers.tiers import Tiers
from inflight.loading.loaded_model import LoadedModel
from inflight.loading.saved.kv_identity import kv_namespace
from inflight.runner.block_io import PoolBlocks
from inflight.runner.staged_blocks import StagedBlocks
from inflight.runner.stores.make_store import make_store
from inflight.runner.tier_threads import TierThreads

__all__ = ["make_tiers"]

_SECRET_BYTES = 16, 4096


def make_tiers(config: EngineConfig, loaded: LoadedModel) -> Tiers | None:
    """The tiers that the option names, for the pool of `loaded`; None if there are none.

    On a GPU, their buffers are allocated here, before the pool is sized.

    Raises:
        LoadError, ConfigError: a tier cannot be used.
    """
    if not config.kv_tiers:
        return None
    secret = b"" if config.kv_store_secret_file is None else _secret(Path(config.kv_store_secret_file).expanduser())
    caches = loaded.layers.caches
    seal = Seal(kv_namespace(config, loaded.info.attention_backend, loaded.info.dtype, caches), secret)
    namespace = seal.namespace.hex()
    tiers, count = [], Counter[str]()
    for options in config.kv_tiers:
        count[options.type] += 1
        name = options.type if count[options.type] == 1 else f"{options.type}-{count[options.type]}"
        tiers.append(Tier(name, make_store(options, namespace), seal, TierThreads, options.write == "second"))
    if loaded.device.type == "cpu":
        return Tiers(tiers, PoolBlocks(caches), seal)
    blocks: KVBlocks = StagedBlocks(loaded.layers, len(tiers) * MOST_IN_HAND)
    return Tiers(tiers, blocks, seal, on_cores=False)


def _secret(path: Path) -> bytes:
    """
    Raises:
        ConfigError: there is no secret in the file.
    """
    shortest, longest = _SECRET_BYTES
    try:
        with path.open("rb") as file:
            secret = file.read(longest + 1).strip()
    except OSError as error:
        raise ConfigError(f"kv_store_secret_file={str(path)!r}: cannot be read: {error.strerror}") from None
    if not shortest <= len(secret) <= longest:
        raise ConfigError(
            f"kv_store_secret_file={str(path)!r} has {len(secret)} bytes: a secret has {shortest} to {longest}; make "
            "one with: openssl rand -hex 32"
        )
    return secret
