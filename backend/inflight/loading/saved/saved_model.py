"""The content of a file of kept weights: decisions and panels of a load; and a loaded model from such a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from inflight.attention.base import AttentionBackend, LayerSpec
from inflight.config import EngineConfig
from inflight.device.memory import available_memory
from inflight.kernels.cpu.cpu_attention import CpuAttention, CpuKVCache
from inflight.kernels.cpu.decoder_parts import decoder_of_parts, parts_of_decoder
from inflight.load_phases import enter_phase
from inflight.loading.check.cases import LONG, Case, that_fit
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.forward.native_decoder import NativeDecoder
from inflight.loading.grammars import checkpoint_grammars
from inflight.loading.load_errors import CannotKeep
from inflight.loading.loaded_model import CheckpointInfo, LoadedModel
from inflight.loading.memory_plan import plan_on_cpu
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.saved.mapped_file import Damaged, MappedFile
from inflight.loading.saved.weights_file import tensors_of

__all__ = ["content_of", "model_of"]

_CPU = torch.device("cpu")
_SEQUENCES = 2  # of the check at load: one at the start, and one at the very end


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    """
    Attributes:
        model: the checkpoint as it was named, for lists only.
        max_model_len, vocab_size, eos_token_ids, dtype, attention_backend: see `CheckpointInfo`.
        layers: the `LayerSpec` of each layer.
        decoder: see `decoder_parts`.
        cases: tokens and first position of sequences that are computed at each start.
        logits: XXH3-128 of their logits, float32, which the start must compute to the last bit.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    attention_backend: str
    layers: list[dict[str, Any]]
    decoder: dict[str, Any]
    cases: list[tuple[list[int], int]]
    logits: bytes


def content_of(loaded: LoadedModel) -> tuple[dict[str, Any], list[Tensor]]:
    """The values and tensors of a model that was loaded and checked; writes to the first blocks of the pool.

    Raises:
        CannotKeep: it runs in another way than as a native decoder, or its check was not complete.
    """
    model, info = loaded.model, loaded.info
    if not isinstance(model, NativeDecoder):
        raise CannotKeep("it runs through transformers")
    if not loaded.checked or loaded.hooks or info.choices:
        raise CannotKeep("its check at load was not complete, or its requests make choices")
    if any(cache.key_scale is not None for cache in loaded.layers.caches):
        raise CannotKeep("its KV pool has scales")
    cases = [Case(case.token_ids[:LONG], case.first_position) for case in loaded.checked[:_SEQUENCES]]
    try:
        decoder, tensors = parts_of_decoder(model.tables)
    except TypeError as error:
        raise CannotKeep(str(error)) from None
    content = _Content(
        model=loaded.config.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        attention_backend=info.attention_backend,
        layers=[_values_of(layer.spec) for layer in model.attention],
        decoder=decoder,
        cases=[(case.token_ids, case.first_position) for case in cases],
        logits=_digest(model, loaded.backend, cases, loaded.config.block_size),
    )
    return msgspec.to_builtins(content, builtin_types=(bytes,)), tensors


def model_of(file: MappedFile, config: EngineConfig, start: float, compare: bool) -> LoadedModel:
    """A loaded model, as `loader.load` returns it.

    Args:
        compare: its logits with those of the load, unless that has been done.

    Raises:
        Damaged: they differ, or the content is of another version.
        CannotKeep: the KV pool holds too little to compare them.
        LoadError: the KV pool does not fit.
    """
    try:
        content = msgspec.convert(file.header.content, _Content, builtin_types=(bytes,))
        specs = [_spec_of(layer) for layer in content.layers]
        dtype = getattr(torch, content.dtype)
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise Damaged(f"its content is of another version: {error}") from None
    backend = CpuAttention()
    modules = [nn.Identity() for _ in specs]
    writes_pages = config.itl_target_ms is not None
    layers = PagedLayers(list(zip(modules, specs)), backend, config.block_size, dtype, _CPU, writes_pages)
    info = CheckpointInfo(
        max_model_len=content.max_model_len,
        vocab_size=content.vocab_size,
        eos_token_ids=content.eos_token_ids,
        dtype=content.dtype,
        device=str(_CPU),
        attention_backend=content.attention_backend,
    )
    info.grammars = checkpoint_grammars(config, info.vocab_size, info.eos_token_ids)
    loaded = LoadedModel(config, None, backend, layers, info, _CPU, dtype, start)
    free = max(0, available_memory(_CPU) - len(file.data))  # which counts pages of files as available
    loaded.give_pool(plan_on_cpu(config, layers.bytes_per_block, info.max_model_len, free))
    addresses = [cache.address for cache in layers.caches if isinstance(cache, CpuKVCache)]
    try:
        tables = decoder_of_parts(content.decoder, tensors_of(file), addresses)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise Damaged(f"its tables are of another version: {error}") from None
    loaded.model = loaded.forward = NativeDecoder(
        tables,
        [module.inflight for module in modules],  # type: ignore[misc]
    )
    loaded.checked = [Case(*case) for case in content.cases]
    if that_fit(list(loaded.checked), info.num_blocks, config.block_size) != loaded.checked:
        raise CannotKeep("the KV pool is too small to check them")
    if compare:
        enter_phase("comparing the logits")
        if _digest(loaded.model, backend, list(loaded.checked), config.block_size) != content.logits:
            raise Damaged("its logits are not those of the load that made it, to the last bit")
    loaded.finish()
    return loaded


def _digest(model: NativeDecoder, backend: AttentionBackend, cases: list[Case], block_size: int) -> bytes:
    """Of the logits: a token's are the same in any batch, with any block size and number of threads."""
    state = xxhash.xxh3_128()
    for logits in paged_logits(model, backend, cases, block_size, _CPU, ()):
        state.update(logits.contiguous().numpy().data)
    return state.digest()


def _values_of(spec: LayerSpec) -> dict[str, Any]:
    stored = spec.kv_cache_dtype
    return {**asdict(spec), "kv_cache_dtype": stored and str(stored).removeprefix("torch.")}


def _spec_of(values: dict[str, Any]) -> LayerSpec:
    stored = values["kv_cache_dtype"]
    return LayerSpec(**{**values, "kv_cache_dtype": stored and getattr(torch, stored)})
