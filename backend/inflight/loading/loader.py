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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from inflight.attention.base import AttentionBackend, LayerSpec
from inflight.attention.dtypes import KV_DTYPES
from inflight.config import EngineConfig
from inflight.device.host_cache import HostCache, host_cache_of
from inflight.device.memory import DeviceMeter, available_memory, meter_of
from inflight.device.step_hook import StepHook
from inflight.engine.attached import RequestChoice
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.grammars.base import Grammars
from inflight.kernels.registry import check_switches, select_attention
from inflight.load_phases import enter_phase
from inflight.loading.check.cases import Case, blocks_of, cases, has_experts, position_limits, that_fit
from inflight.loading.check.float32_reference import can_run_in_float32
from inflight.loading.check.load_check import EXACT, LoadCheck, Reference, reference, tolerance
from inflight.loading.checkpoint.checkpoint_config import dtype_of, eos_token_ids, max_model_len, read_config
from inflight.loading.checkpoint.kv_scales import kv_scales
from inflight.loading.checkpoint.quant_method import loader_of
from inflight.loading.checkpoint.weights import check_weights_fit
from inflight.loading.forward.acceleration import CannotQuantize, accelerate
from inflight.loading.forward.last_logits import KeepsLogits
from inflight.loading.forward.rotary import attach_request_rotary
from inflight.loading.forward.switched_kernels import attach_kernels
from inflight.loading.grammars import checkpoint_grammars
from inflight.loading.load_errors import LoadError, in_models_code
from inflight.loading.memory_plan import DeviceMemory, MemoryPlan, num_host_blocks, plan_on_cpu, plan_on_gpu
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.profile_step import largest_steps
from inflight.loading.quantization.schemes import scheme_of
from inflight.loading.recognise.attention_probe import probe

__all__ = ["CheckpointInfo", "LoadError", "LoadedModel", "device_of", "load"]

_log = logging.getLogger(__name__)

# The longest sequence of the check at load, in tokens; and the number of weights that the check can read, token by
# token, before its sequences are cut to a few tokens: a fifth of a second on a CPU core.
_CHECKED_TOKENS = 512
_CHECKED_WEIGHTS = 4_000_000_000
_REPEATS = 8  # sequences at each place, where half precision can change the choice of an expert


@dataclass
class CheckpointInfo:
    """Facts about the loaded checkpoint for the engine and the frontend.

    Attributes:
        max_model_len: maximum tokens per request; never more than the pool can hold.
        vocab_size: logits per token.
        eos_token_ids: ids that end a request unless it ignores them.
        load_seconds: time that loading took.
        num_blocks: KV blocks in the pool; this field and the sizes below are 0 until the pool is allocated.
        kv_bytes: size of the pool.
        num_host_blocks: KV blocks in host memory, for swapped requests.
        swap_seconds_per_block: measured time to copy a block to the host and back.
        choices: made for each request on arrival, such as the frequencies of its rotary embedding.
        grammars: of the checkpoint's vocabulary.
        graph_bytes: bytes that captured CUDA graphs take.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    attention_backend: str
    load_seconds: float = 0.0
    num_blocks: int = 0
    kv_bytes: int = 0
    num_host_blocks: int = 0
    swap_seconds_per_block: float = 0.0
    choices: list[RequestChoice] = field(default_factory=list)
    grammars: Grammars | None = None
    graph_bytes: int = 0


@dataclass
class _Sizing:
    """The measurements that size a GPU's pool, once a step can be run.

    Attributes:
        meter: of the device.
        used_before: bytes in use before the weights were loaded.
        weights: bytes of parameters and buffers.
        num_blocks: of the pool that steps are measured with.
        check: is repeated with the real pool.
    """

    meter: DeviceMeter
    used_before: int
    weights: int
    num_blocks: int
    check: LoadCheck


class StepGraphs(Protocol):
    """The CUDA graphs of a runner's steps, if it captures any."""

    def measure(self, meter: DeviceMeter) -> int:
        """Bytes that `capture` will take; leaves nothing of it allocated.  On a pool of any size."""

    def capture(self, meter: DeviceMeter) -> int:
        """Capture on the pool that steps will use; returns the bytes that it took."""


@dataclass
class LoadedModel:
    """Ready for ragged batches; on a GPU after `allocate`.

    Attributes:
        model: `model(input_ids[1, T], position_ids[1, T], ...)` in a forward context of `backend`: transformers'
            module or its replacement.
        host_cache: host memory for swapped requests, if any.
        hooks: are called before the forward pass of each step.
    """

    config: EngineConfig
    model: Any
    backend: AttentionBackend
    layers: PagedLayers
    info: CheckpointInfo
    device: torch.device
    dtype: torch.dtype
    start: float
    host_cache: HostCache | None = None
    hooks: list[StepHook] = field(default_factory=list)
    _sizing: _Sizing | None = field(default=None, repr=False)

    def allocate(self, run: Callable[[SchedulerOutput], StepOutput], graphs: StepGraphs | None = None) -> None:
        """On a GPU, give the pool what the largest step and the graphs leave; on a CPU `load` has allocated it.

        Args:
            run: runs a step as it will be run, sampling included.
            graphs: captured here, once the addresses of the pool are known.

        Raises:
            LoadError: the largest step, or one request of `max_model_len`, does not fit; or the logits are wrong.
        """
        if self._sizing is None:
            return
        sizing, self._sizing = self._sizing, None
        self._allocate(self._measured_plan(sizing, run, graphs))
        _require(sizing.check.that_fits(self.info.num_blocks), self.model)
        if graphs is not None:
            self.info.graph_bytes = graphs.capture(sizing.meter)
        self._finish()

    def _measured_plan(
        self, sizing: _Sizing, run: Callable[[SchedulerOutput], StepOutput], graphs: StepGraphs | None
    ) -> MemoryPlan:
        config, info, meter = self.config, self.info, sizing.meter
        results: list[StepOutput] = []
        outs = largest_steps(config, info.max_model_len, sizing.num_blocks, info.vocab_size)
        step = max(meter.peak_of(partial(lambda out: results.append(run(out)), out)) for out in outs)
        if any(result.failure for result in results):
            raise LoadError(
                f"a step of max_num_batched_tokens={config.step_tokens} and max_num_seqs="
                f"{config.max_num_seqs} does not fit the GPU's memory beside the weights; lower them"
            )
        for_graphs = graphs.measure(meter) if graphs is not None else 0
        memory = DeviceMemory(meter.total, sizing.used_before, meter.used(), sizing.weights, step, for_graphs)
        return plan_on_gpu(config, self.layers.bytes_per_block, info.max_model_len, memory)

    def _allocate(self, plan: MemoryPlan) -> None:
        _log.info("%s", plan)
        info, bytes_per_block = self.info, self.layers.bytes_per_block
        info.num_blocks, info.kv_bytes = plan.num_blocks, plan.pool
        info.num_host_blocks = num_host_blocks(self.config, bytes_per_block, plan.num_blocks, self.device)
        self.layers.allocate(plan.num_blocks)

    def _finish(self) -> None:
        """The pool is allocated and the logits are right."""
        if self.info.num_host_blocks:
            self.host_cache = host_cache_of(self.layers.caches, self.info.num_host_blocks)
            self.info.swap_seconds_per_block = self.host_cache.seconds_per_block()
        self.info.load_seconds = time.perf_counter() - self.start


def load(config: EngineConfig) -> LoadedModel:
    """Load and probe the model, attach attention, check the logits, and on a CPU allocate the pool.

    Raises:
        LoadError: not a checkpoint, an unsupported architecture or feature, or not enough memory.
        ConfigError: an option that contradicts the checkpoint.
    """
    start = time.perf_counter()
    device = device_of(config.device)
    hf_config = read_config(config)
    text_config = hf_config.get_text_config(decoder=True)
    dtype, length = dtype_of(config.dtype, text_config), max_model_len(config, text_config)
    load_weights = loader_of(config, hf_config)
    scheme_of(config).check(config, device, dtype)
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
        loaded._allocate(plan_on_cpu(config, layers.bytes_per_block, length, available_memory(device)))
        num_blocks = info.num_blocks
    found_cases = that_fit(found_cases, num_blocks, config.block_size)
    enter_phase("computing reference logits")
    check = _load_check(model, text_config.model_type, loaded, found_cases, limits)
    loaded.model = _checked_forward(model, config, check, device, length)
    if loaded.model is model and not found.keeps_logits:
        _log.warning("%s ignores logits_to_keep: it computes the logits of all tokens", type(model).__name__)
        loaded.model = KeepsLogits(model)
    if meter is not None:
        loaded._sizing = _Sizing(meter, used_before, _weight_bytes(model), num_blocks, check)
    else:
        loaded._finish()
    return loaded


def device_of(name: str) -> torch.device:
    """The device that the option `device` names.

    Raises:
        LoadError: there is no such device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError('device="cuda", but torch finds no CUDA device; install a CUDA build of torch or use "cpu"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    budget = min(_CHECKED_TOKENS, worth // max(1, num_weights * repeats))
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
    allowed = tolerance(expected, KV_DTYPES[config.kv_cache_dtype], scheme_of(config).tolerance)
    check = LoadCheck(
        model_type, loaded.backend, expected, allowed, config.block_size, device, loaded.hooks, tuple(limits)
    )
    if allowed > EXACT:
        _require_right(check, lambda part: part.structure_error(model, loaded.layers), EXACT, "in float32 ")
    return check


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
    """The fastest forward pass that agrees with transformers' attention."""
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
