"""`load`: from a checkpoint to a forward pass with paged attention and a KV pool.

`AutoModelForCausalLM` loads the checkpoint with our attention implementation; a probe then finds each
layer's attention.  Unsupported features are rejected here, by name, before the first request.

On a CPU the pool comes first: the native decoder needs its address.  On a GPU it comes last, and gets what merged
weights, workspaces, the largest step and CUDA graphs leave:

    load  ->  a pool of a few blocks  ->  merge, check
          ->  `LoadedModel.allocate`: measure a step and graphs, plan, pool, check, capture
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from inflight.attention.base import LayerSpec
from inflight.attention.dtypes import KV_DTYPES
from inflight.config import EngineConfig
from inflight.device.memory import available_memory, meter_of
from inflight.kernels.registry import check_switches, select_attention
from inflight.load_phases import enter_phase
from inflight.loading.check.cases import Case, blocks_of, cases, has_experts, position_limits, that_fit
from inflight.loading.check.load_check import EXACT, LoadCheck, Reference, reference, tolerance
from inflight.loading.checkpoint.checkpoint_config import dtype_of, eos_token_ids, max_model_len, read_config
from inflight.loading.checkpoint.headless import is_encoder
from inflight.loading.checkpoint.kv_scales import kv_scales
from inflight.loading.checkpoint.quant_method import loader_of
from inflight.loading.checkpoint.weights import check_weights_fit
from inflight.loading.encoders import load_encoder
from inflight.loading.forward.acceleration import CannotQuantize, accelerate
from inflight.loading.forward.forward_pass import ModulePass
from inflight.loading.forward.last_logits import KeepsLogits
from inflight.loading.forward.rotary import attach_request_rotary
from inflight.loading.forward.switched_kernels import attach_kernels
from inflight.loading.grammars import checkpoint_grammars
from inflight.loading.load_errors import LoadError, in_models_code
from inflight.loading.loaded_model import CheckpointInfo, LoadedModel, Sizing, device_of
from inflight.loading.memory_plan import plan_on_cpu
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.quantization.coded_linear import ROUNDED_INPUTS, num_weights, rounds_inputs
from inflight.loading.quantization.in_float32 import can_run_in_float32
from inflight.loading.quantization.schemes import check_scheme, scheme_of
from inflight.loading.recognise.attention_probe import probe

__all__ = ["LoadError", "LoadedModel", "load"]

_log = logging.getLogger(__name__)

# The longest sequence of the check at load, in tokens; and the number of weights that the check can read, token by
# token, before its sequences are cut to a few tokens: a fifth of a second on a CPU core.
_CHECKED_TOKENS = 512
_CHECKED_WEIGHTS = 4_000_000_000
_REPEATS = 8  # sequences at each place, where half precision can change the choice of an expert


def load(config: EngineConfig) -> LoadedModel:
    """Load and probe the model, attach attention, check the logits, and on a CPU allocate the pool.

    Raises:
        LoadError: not a checkpoint, an unsupported architecture or feature, or not enough memory.
        ConfigError: an option that contradicts the checkpoint.
    """
    start = time.perf_counter()
    device = device_of(config.device)
    hf_config = read_config(config)
    if is_encoder(hf_config.to_dict()):
        return load_encoder(config, hf_config)
    text_config = hf_config.get_text_config(decoder=True)
    dtype, length = dtype_of(config.dtype, text_config), max_model_len(config, text_config)
    load_weights = loader_of(config, hf_config)
    check_scheme(config, device, dtype)
    check_switches(config.kernel_config, device)
    check_weights_fit(config, hf_config, dtype, device)
    meter = meter_of(device)
    used_before = meter.used() if meter is not None else 0
    enter_phase("reading the weights")
    model = load_weights(config, hf_config, dtype, device)
    kv_dtype = KV_DTYPES[config.kv_cache_dtype]
    found = probe(model, text_config, length, device)
    probed = [(module, replace(spec, kv_cache_dtype=kv_dtype)) for module, spec in found.layers]
    backend = select_attention(
        config.attention_backend,
        [spec for _, spec in probed],
        dtype,
        config.block_size,
        device,
        config.kernel_config,
    )
    writes_pages = config.itl_target_ms is not None and device.type == "cpu"
    scales = kv_scales(config, model, probed, text_config, length)
    layers = PagedLayers(probed, backend, config.block_size, dtype, device, writes_pages, scales)
    info = CheckpointInfo(
        max_model_len=length,
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=eos_token_ids(model, text_config),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend.name,
    )
    info.grammars = checkpoint_grammars(config, info.vocab_size, info.eos_token_ids)
    loaded = LoadedModel(config, model, backend, layers, info, device, dtype, start)
    limits = position_limits(text_config)
    found_cases = _cases(text_config, limits, length, [spec for _, spec in probed], model, device)
    num_blocks = sum(blocks_of(case, config.block_size) for case in found_cases)
    if meter is not None:
        layers.allocate(num_blocks)
    else:
        loaded.give_pool(plan_on_cpu(config, layers.bytes_per_block, length, available_memory(device)))
        num_blocks = info.num_blocks
    all_cases, found_cases = found_cases, that_fit(found_cases, num_blocks, config.block_size)
    enter_phase("computing reference logits")
    check = _load_check(model, text_config.model_type, loaded, found_cases, limits)
    loaded.model = loaded.forward = _checked_forward(model, config, check, device, length)
    if config.check_on_load and found_cases == all_cases:
        loaded.checked = found_cases
    if loaded.model is model and not found.keeps_logits:
        _log.warning("%s ignores logits_to_keep: it computes the logits of all tokens", type(model).__name__)
        loaded.model = KeepsLogits(model)
    if loaded.forward is model:
        loaded.forward = ModulePass(loaded.model)
    if meter is not None:
        recheck = partial(_recheck, check, loaded)
        loaded.sizing = Sizing(meter, used_before, _weight_bytes(model), num_blocks, check, recheck)
    else:
        loaded.finish()
    return loaded


def _recheck(check: LoadCheck, loaded: LoadedModel, num_blocks: int) -> None:
    _require(check.that_fits(num_blocks), loaded.model)


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; tensors that are views of one another count once."""
    storages = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _cases(
    text_config: Any, limits: list[int], max_len: int, specs: list[LayerSpec], model: nn.Module, device: torch.device
) -> list[Case]:
    """Sequences for the check at load; past a window only where that costs little time."""
    windows = [spec.sliding_window for spec in specs if spec.sliding_window is not None]
    worth = _CHECKED_WEIGHTS * (1000 if device.type == "cuda" else 1)
    is_half = next(model.parameters()).dtype != torch.float32
    repeats = _REPEATS if is_half and has_experts(text_config) else 1
    budget = min(_CHECKED_TOKENS, worth // max(1, num_weights(model) * repeats))
    return cases(int(text_config.vocab_size), max_len, limits, min(windows, default=None), budget, repeats)


def _load_check(
    model: nn.Module, model_type: str, loaded: LoadedModel, found: list[Case], limits: list[int]
) -> LoadCheck:
    """Made before anything of `model` is replaced: computes what transformers does.  Attaches the rotary choice.

    Raises:
        LoadError: paged attention drops a feature of the model.
    """
    config, device = loaded.config, loaded.device
    expected = _reference(model, model_type, found, device) if config.check_on_load else None
    num_tokens = sum(len(case.token_ids) for case in found)  # a step of the check may be larger than one of the engine
    step = max(config.max_num_seqs, len(found)), max(config.step_tokens, num_tokens)
    rotary = attach_request_rotary(model, loaded.info.max_model_len, *step, device)
    if rotary is not None:
        loaded.info.choices.append(rotary.choice)
        loaded.hooks.append(rotary)
    allowed = tolerance(expected, KV_DTYPES[config.kv_cache_dtype], _rounding(model, config))
    check = LoadCheck(
        model_type, loaded.backend, expected, allowed, config.block_size, device, loaded.hooks, tuple(limits)
    )
    if allowed > EXACT:
        _require_right(check, lambda part: part.structure_error(model, loaded.layers), EXACT, "in float32 ")
    return check


def _rounding(model: nn.Module, config: EngineConfig) -> float:
    """Relative error that the storage of weights explains, and inputs in eight bits."""
    return max(scheme_of(config).tolerance, ROUNDED_INPUTS if rounds_inputs(model) else 0.0)


def _reference(model: nn.Module, model_type: str, found: list[Case], device: torch.device) -> Reference:
    try:
        if can_run_in_float32(model):
            return reference(model, found, device, widens=True)
        return reference(model, found, device)
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise LoadError(
            f"model type {model_type!r} is not supported: transformers' eager attention, with which its logits are "
            f"compared, fails: {type(error).__name__}: {error}{in_models_code(error)}"
        ) from error


def _checked_forward(
    model: nn.Module, config: EngineConfig, check: LoadCheck, device: torch.device, max_model_len: int
) -> Any:
    """The fastest forward pass that agrees with transformers' attention: `model`, or what implements `ForwardPass`."""
    forward, scheme = model, scheme_of(config)
    if config.native_forward:
        try:
            forward = accelerate(model, device, check.passes, max_model_len, scheme, config.kernel_config)
        except CannotQuantize as why:
            raise LoadError(f'quantization="{scheme.name}" is not supported: {why}; remove it') from why
    attach_kernels(model, config.kernel_config, lambda: check.passes(forward))
    _require(check, forward)
    return forward


def _require(check: LoadCheck, forward: Any) -> None:
    """Raise LoadError unless the logits of `forward` are right."""
    _require_right(check, lambda part: part.error(forward), check.tolerance)


def _require_right(check: LoadCheck, error_of: Callable[[LoadCheck], float], allowed: float, how: str = "") -> None:
    off = error_of(check)
    if off <= allowed:
        return
    for limit in check.limits:
        within = check.up_to(limit)
        if within is not None and error_of(within) <= allowed:
            raise LoadError(
                f"model type {check.model_type!r} is not supported at this max_model_len: beyond {limit} tokens, which "
                f"its config.json names, {how}the logits of a test batch differ by {off:.1%} from those of each "
                "request alone: what the model computes depends on the other requests, or on where a prompt is cut "
                f"into chunks; set max_model_len to at most {limit}"
            )
    raise LoadError(
        f"model type {check.model_type!r} is not supported: {how}the logits of a test batch differ by "
        f"{off:.1%} (tolerance: {allowed:.1%}) from those of transformers' attention, {_cause(check, how)}; set "
        "check_on_load to false only if you know why they differ"
    )


def _cause(check: LoadCheck, how: str) -> str:
    if how or check.expected is None or not check.expected.own_error:
        return "so paged attention drops a feature of the model"
    return (
        "though in float32 they agree: a kernel is wrong in this dtype, or the model magnifies its rounding; try "
        "dtype float32, or native_forward false"
    )
