"""`load_encoder`: from a checkpoint of an encoder (BERT and its relatives) to hidden states of whole prompts.

Its tokens look both ways, so a prompt is computed in one step, and nothing of it is kept: there is no KV pool, and the
scheduler's blocks stand for no memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.base import LayerSpec
from inflight.attention.whole_rows import WholeRowAttention
from inflight.config import ConfigError, EngineConfig
from inflight.load_phases import enter_phase
from inflight.loading.check.encoder_check import EncoderCheck, check_prompts
from inflight.loading.checkpoint.checkpoint_config import dtype_of, max_model_len
from inflight.loading.checkpoint.headless import json_of
from inflight.loading.checkpoint.quant_method import quant_method
from inflight.loading.checkpoint.weights import check_weights_fit, dummy_weights, pretrained
from inflight.loading.forward.encoder_pass import (
    ClassifierHead,
    EncoderPass,
    attach_relative_bias,
    first_position,
    has_relative_bias,
)
from inflight.loading.forward.native_encoder import attach_native_encoder
from inflight.loading.forward.packed_linear import pack_linears
from inflight.loading.forward.rotary import kinds_of
from inflight.loading.load_errors import LoadError
from inflight.loading.loaded_model import CheckpointInfo, LoadedModel, device_of
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.recognise.encoder_probe import encoder_layers

__all__ = ["load_encoder"]

_log = logging.getLogger(__name__)


def load_encoder(config: EngineConfig, hf_config: Any) -> LoadedModel:
    """Load the model, attach attention, and compare hidden states with transformers'.

    Raises:
        LoadError: an unsupported feature, or not enough memory.
        ConfigError: an option that contradicts the checkpoint.
    """
    start = time.perf_counter()
    device, dtype = device_of(config.device), dtype_of(config.dtype, hf_config)
    _check_options(config, hf_config)
    most = max_model_len(config, hf_config)
    check_weights_fit(config, hf_config, dtype, device)
    enter_phase("reading the weights")
    load: Callable[..., nn.Module] = dummy_weights if config.load_format == "dummy" else pretrained
    model = load(config, hf_config, dtype, device)
    base = _base_of(model)
    offset = first_position(base)
    length = _length(config, hf_config, most, offset)
    backend = WholeRowAttention()
    probed = [] if has_relative_bias(base) else encoder_layers(base, device)
    _check_layers(hf_config, base, len(probed))
    layers = PagedLayers(probed, backend, config.block_size, dtype, device)
    layers.allocate(0)
    info = CheckpointInfo(
        max_model_len=length,
        vocab_size=int(hf_config.vocab_size),
        eos_token_ids=[],
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend.name,
        num_blocks=config.max_num_seqs * -(-length // config.block_size),
        whole_prompts=True,
    )
    head = None if base is model else ClassifierHead(model, base)
    seats = max(config.max_num_seqs, 8)  # as many as the check has prompts
    forward = EncoderPass(base, head, offset, seats, info.vocab_size)
    check = None
    if config.check_on_load:
        windows = [spec.sliding_window for _, spec in probed if spec.sliding_window is not None]
        prompts = check_prompts(info.vocab_size, length, min(windows, default=None), forward.knows_pairs)
        check = EncoderCheck.of(model, base, prompts, head and _reader(hf_config), device)
    if has_relative_bias(base):
        attach_relative_bias(base)
    _accelerate(model, [spec for _, spec in probed], config, check, forward, backend, device)
    loaded = LoadedModel(config, model, backend, layers, info, device, dtype, start, hooks=[forward])
    loaded.forward = forward
    loaded.finish()
    return loaded


def classifier_pooling(hf_config: Any) -> str:
    """The pooling in front of the head of such a classifier: "cls", or "mean" where config.json says so."""
    return "mean" if getattr(hf_config, "classifier_pooling", None) == "mean" else "cls"


def _reader(hf_config: Any) -> Callable[[Tensor], Tensor]:
    return (lambda row: row.mean(dim=0)) if classifier_pooling(hf_config) == "mean" else (lambda row: row[0])


def _base_of(model: Any) -> Any:
    """The encoder of a classifier; of a model without a head itself."""
    return model.base_model


def _check_options(config: EngineConfig, hf_config: Any) -> None:
    """Raise for options that an encoder has no use for, and that would change what is computed."""
    kind = f"{config.model!r} is an encoder ({hf_config.model_type})"
    if quant_method(hf_config) is not None or config.quantization is not None:
        raise ConfigError(f"{kind}, whose weights cannot be quantized yet; remove quantization, or take plain weights")
    if config.speculative_config is not None:
        raise ConfigError(f"{kind}: it generates no text, so there is nothing to draft; remove speculative_config")
    if config.enable_lora:
        raise ConfigError(f"{kind}, and adapters are for decoders; merge the adapter into it, and remove enable_lora")
    if config.kv_tiers:
        raise ConfigError(f"{kind}, whose KV is not kept; remove kv_tiers")
    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events and events.publisher != "null":
        raise ConfigError(f"{kind}, which has no prefix cache to tell of; remove kv_events_config")
    if config.attention_backend != "auto":
        raise ConfigError(
            f"{kind}, whose attention keeps no KV: attention_backend={config.attention_backend!r} is for decoders; "
            'set it to "auto"'
        )


def _length(config: EngineConfig, hf_config: Any, most: int, offset: int) -> int:
    """Tokens that a prompt can have.

    Raises:
        ConfigError: a step has no room for as many, or the checkpoint no positions.
    """
    positions = getattr(hf_config, "max_position_embeddings", None)
    limit = most if positions is None else int(positions) - offset
    length = min(most, limit)
    if config.max_model_len is None:
        options = json_of(config, "sentence_bert_config.json")
        trained = options.get("max_seq_length") if isinstance(options, dict) else None
        length = min(length, trained) if isinstance(trained, int) and trained > 0 else length
    elif config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the checkpoint has {positions} positions and starts at position "
            f"{offset}, so at most {limit} tokens have one; lower it"
        )
    if config.step_tokens < length:
        raise ConfigError(
            f"max_num_batched_tokens={config.step_tokens} is less than max_model_len={length}, and an encoder computes "
            "a prompt in one step; raise the first, or lower the second"
        )
    return length


def _check_layers(hf_config: Any, base: nn.Module, found: int) -> None:
    expected = int(hf_config.num_hidden_layers)
    if found != expected and not has_relative_bias(base):
        raise LoadError(
            f"model type {hf_config.model_type!r} is not supported: {found} attention calls for {expected} layers; "
            "each layer must call its attention exactly once through transformers' AttentionInterface"
        )
    if any(kinds_of(module) for module in base.modules()):
        raise LoadError(
            f"model type {hf_config.model_type!r} is not supported with a rotary embedding that depends on the length "
            "of a sequence"
        )


def _accelerate(
    model: nn.Module,
    specs: list[LayerSpec],
    config: EngineConfig,
    check: EncoderCheck | None,
    forward: EncoderPass,
    backend: WholeRowAttention,
    device: torch.device,
) -> None:
    """On a CPU, compute the layers natively and pack other linear layers, unless that makes the result wrong.

    Raises:
        LoadError: it is wrong anyway.
    """
    if config.native_forward and device.type == "cpu":
        enter_phase("packing the weights")
        undo = attach_native_encoder(_base_of(model), specs, lambda: forward.rows_read)
        if undo is not None and check is not None and not check.passes(forward, backend, config.block_size):
            undo()
            _log.warning("%s runs on transformers' layers: the native ones compute others", type(model).__name__)
        undo = pack_linears(model)
        if undo is not None and check is not None and not check.passes(forward, backend, config.block_size):
            undo()
            _log.warning("%s runs on torch's linear layers: the packed ones compute others", type(model).__name__)
    if check is not None:
        check.require(forward, backend, config.block_size)
