"""The KV tiers of a loaded model."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import cast

from inflight.config import ConfigError, EngineConfig
from inflight.engine.tiers.base import KVBlocks
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import MOST_IN_HAND, Tier
from inflight.engine.tiers.tiers import Tiers
from inflight.loading.loaded_model import LoadedModel
from inflight.loading.saved.kv_identity import kv_namespace
from inflight.runner.block_io import PoolBlocks
from inflight.runner.staged_blocks import StagedBlocks
from inflight.runner.stores.host import HostStore
from inflight.runner.stores.make_store import make_store
from inflight.runner.stores.peer_address import expect_private, host_and_port
from inflight.runner.stores.peer_server import PeerServer
from inflight.runner.tier_threads import TierThreads

__all__ = ["make_tiers"]

_SECRET_BYTES = 16, 4096


def make_tiers(config: EngineConfig, loaded: LoadedModel) -> Tiers | None:
    """The tiers that the option names, for the pool of `loaded`; None if there are none.

    On a GPU, their buffers are allocated here, before the pool is sized.

    Raises:
        LoadError, ConfigError: a tier cannot be used.
    """
    expect_private(config)
    if not config.kv_tiers:
        return None
    secret = b"" if config.kv_store_secret_file is None else _secret(Path(config.kv_store_secret_file).expanduser())
    caches = loaded.layers.caches
    seal = Seal(kv_namespace(config, loaded.info.attention_backend, loaded.info.dtype, caches), secret)
    namespace = seal.namespace.hex()
    tiers, count = list[Tier](), Counter[str]()
    stores = [make_store(options, namespace, secret) for options in config.kv_tiers]
    for options, store in zip(config.kv_tiers, stores):
        count[options.type] += 1
        name = options.type if count[options.type] == 1 else f"{options.type}-{count[options.type]}"
        keeps = "none" if options.type == "peer" else options.write
        tiers.append(Tier(name, store, seal, TierThreads, keeps, is_shared=options.type not in ("host", "peer")))
    if loaded.device.type == "cpu":
        made = Tiers(tiers, PoolBlocks(caches), seal)
    else:
        blocks: KVBlocks = StagedBlocks(loaded.layers, len(tiers) * MOST_IN_HAND)
        made = Tiers(tiers, blocks, seal, on_cores=False)
    if config.kv_listen is not None:
        served = next(index for index, options in enumerate(config.kv_tiers) if options.type == "host")
        try:
            _serve(config.kv_listen, secret, made, tiers[served], cast(HostStore, stores[served]))
        except BaseException:
            made.close(0.0)
            raise
    return made


def _serve(address: str, secret: bytes, tiers: Tiers, tier: Tier, store: HostStore) -> None:
    """Let others read this store until `tiers` are closed, or are no more: if the model cannot be loaded, they go."""
    of_tiers, queued = weakref.ref(tiers), tier.queued

    def is_coming(key: bytes) -> bool:
        now = of_tiers()
        return now is not None and (now.coming(tier, key) or key in queued)

    store.evicted = tier.forget  # so that it is stored again when it is computed or found again
    server = PeerServer(*host_and_port(address), store, is_coming, tiers.seal.namespace, secret)
    tiers.closing = weakref.finalize(tiers, server.close)


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
