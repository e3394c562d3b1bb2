"""A loaded checkpoint: what runner and engine need of it, and on a GPU its pool, which is measured last."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from inflight.attention.base import AttentionBackend
from inflight.config import EngineConfig
from inflight.device.host_cache import HostCache, host_cache_of
from inflight.device.memory import DeviceMeter
from inflight.device.step_hook import StepHook
from inflight.engine.adapter import Adapters
from inflight.engine.pooler_facts import PoolerFacts
from inflight.engine.request_choice import RequestChoice
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.tiers.tiers import Tiers
from inflight.grammars.base import Grammars
from inflight.loading.check.cases import Case
from inflight.loading.forward.forward_pass import ForwardPass
from inflight.loading.load_errors import LoadError
from inflight.loading.memory_plan import DeviceMemory, MemoryPlan, num_host_blocks, plan_on_gpu
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.profile_step import largest_steps

if TYPE_CHECKING:
    from inflight.loading.check.load_check import LoadCheck  # imports transformers

__all__ = ["CheckpointInfo", "LoadedModel", "Sizing", "StepGraphs", "device_of"]

_log = logging.getLogger(__name__)


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
        whole_prompts: a prompt is computed in one step, and no other request can use what was computed of it.
        adapters: that requests can choose; known to a runner; None: `enable_lora` is off.
        graph_bytes: bytes that captured CUDA graphs take.
        pooler: vectors that the checkpoint can yield; known to a runner.
        tiers: that keep KV beyond the pool; made for a runner.
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
    whole_prompts: bool = False
    adapters: Adapters | None = None
    graph_bytes: int = 0
    pooler: PoolerFacts = field(default_factory=PoolerFacts)
    tiers: Tiers | None = None


@dataclass
class Sizing:
    """The measurements that size a GPU's pool, once a step can be run.

    Attributes:
        meter: of the device.
        used_before: bytes in use before the weights were loaded.
        weights: bytes of parameters and buffers.
        num_blocks: of the pool that steps are measured with.
        check: of the logits.
        recheck: compares the logits once more with a pool of so many blocks; raises LoadError.
    """

    meter: DeviceMeter
    used_before: int
    weights: int
    num_blocks: int
    check: LoadCheck
    recheck: Callable[[int], None]


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
        forward: the same, for runners.
        host_cache: host memory for swapped requests, if any.
        hooks: are called before the forward pass of each step.
        checked: sequences for which `model` computes the right logits, if all of the check at load has been made.
        sizing: of a GPU's pool, until `allocate`.
        adapter_bytes: of a GPU's slots for adapters, which are allocated before the pool.
    """

    config: EngineConfig
    model: Any
    backend: AttentionBackend
    layers: PagedLayers
    info: CheckpointInfo
    device: torch.device
    dtype: torch.dtype
    start: float
    forward: ForwardPass = field(init=False)
    host_cache: HostCache | None = None
    hooks: list[StepHook] = field(default_factory=list)
    checked: Sequence[Case] = ()
    sizing: Sizing | None = field(default=None, repr=False)
    adapter_bytes: int = 0

    def allocate(self, run: Callable[[SchedulerOutput], StepOutput], graphs: StepGraphs | None = None) -> None:
        """On a GPU, give the pool what the largest step and the graphs leave; on a CPU `load` has allocated it.

        Args:
            run: runs a step as it will be run, sampling included.
            graphs: captured here, once the addresses of the pool are known.

        Raises:
            LoadError: the largest step, or one request of `max_model_len`, does not fit; or the logits are wrong.
        """
        if self.sizing is None:
            return
        sizing, self.sizing = self.sizing, None
        self.give_pool(self._measured_plan(sizing, run, graphs))
        sizing.recheck(self.info.num_blocks)
        if graphs is not None:
            self.info.graph_bytes = graphs.capture(sizing.meter)
        self.finish()

    def _measured_plan(
        self, sizing: Sizing, run: Callable[[SchedulerOutput], StepOutput], graphs: StepGraphs | None
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
        memory = DeviceMemory(
            meter.total, sizing.used_before, meter.used(), sizing.weights, step, for_graphs, self.adapter_bytes
        )
        return plan_on_gpu(config, self.layers.bytes_per_block, info.max_model_len, memory)

    def give_pool(self, plan: MemoryPlan) -> None:
        """Allocate the pool as planned."""
        _log.info("%s", plan)
        info, bytes_per_block = self.info, self.layers.bytes_per_block
        info.num_blocks, info.kv_bytes = plan.num_blocks, plan.pool
        info.num_host_blocks = num_host_blocks(self.config, bytes_per_block, plan.num_blocks, self.device)
        self.layers.allocate(plan.num_blocks)

    def finish(self) -> None:
        """The pool is allocated and the logits are right."""
        if self.info.num_host_blocks:
            self.host_cache = host_cache_of(self.layers.caches, self.info.num_host_blocks)
            self.info.swap_seconds_per_block = self.host_cache.seconds_per_block()
        self.info.load_seconds = time.perf_counter() - self.start


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
