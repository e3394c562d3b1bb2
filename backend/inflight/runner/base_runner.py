"""The parts that all runners share: a loaded checkpoint, the state of the slots, and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inflight.config import EngineConfig
from inflight.device.batch_state import BatchState
from inflight.device.host_cache import HostCache
from inflight.engine.step import SchedulerOutput
from inflight.kernels.registry import select_sampling
from inflight.loading.loaded_model import LoadedModel
from inflight.loading.pooler import load_pooler
from inflight.loading.startup import load_or_reuse
from inflight.runner import cpu_threads
from inflight.runner.adapters import attach_adapters
from inflight.runner.forced_rows import ForcedRows
from inflight.runner.kv_tiers import make_tiers
from inflight.runner.pooling import RowPooling
from inflight.runner.prompt_logprobs import PromptLogprobs
from inflight.runner.row_faults import RowFaults
from inflight.sampling import Sampler, SamplingTable
from inflight.sampling.compile_ops import compile_ops
from inflight.sampling.rules import LogitsRule, rules_of

__all__ = ["BaseRunner", "load_on_threads"]


def load_on_threads(config: EngineConfig) -> LoadedModel:
    """`load_or_reuse`, with as many threads as this process can use."""
    torch.set_num_threads(config.cpu_threads or min(torch.get_num_threads(), cpu_threads.available_cpus()))
    return load_or_reuse(config)


class BaseRunner:
    """A subclass calls `loaded.allocate` once it can run a step, and takes `loaded.host_cache`.

    Args:
        config: engine options.
        loaded: the checkpoint.
        rules: kinds of logits rules, the grammars of the checkpoint aside.

    Attributes:
        host_cache: for swapped requests, if any.
        draft_runner: runs the model that drafts for this one, if any; set by `make_runner`.
        num_collected_first: launches that waited for the previous step, because a rule of a row reads tokens.
    """

    draft_runner: Any = None
    num_collected_first = 0

    def __init__(self, config: EngineConfig, loaded: LoadedModel, rules: Sequence[type[LogitsRule]]) -> None:
        self.info = info = loaded.info
        self.model = loaded.model
        self.backend = loaded.backend
        self.device = device = loaded.device
        self.adapters = attach_adapters(config, loaded)
        self.hooks = [*loaded.hooks, *self.adapters]
        self.host_cache: HostCache | None = None
        self.state = BatchState(config.max_num_seqs, info.max_model_len, config.block_size, device)
        ops = select_sampling(device)
        self.table = SamplingTable(config.max_num_seqs, info.vocab_size, device, rules_of(info.grammars, rules), ops)
        self.faults = RowFaults(self.table, info.eos_token_ids)
        self.sampler = Sampler()
        compile_ops(info.vocab_size, loaded.dtype, device, ops, rules)
        self.forward = loaded.forward
        self.forward.max_rows = max(self.forward.max_rows, config.max_num_seqs)
        self.prompt_logprobs = PromptLogprobs(self.state)
        pooler = load_pooler(config, self.forward.yields_hidden, device, self.forward.head)
        info.pooler = pooler.facts
        info.tiers = make_tiers(config, loaded)
        self.pooling = RowPooling(pooler, config.max_num_seqs, device)
        self.forced = ForcedRows(info.grammars, self.state)

    def fill_rows(self, out: SchedulerOutput) -> None:
        """Store the tokens and parameters of rows that enter, and drafts; once per step."""
        self.state.fill_rows(out)
        self.prompt_logprobs.fill_rows(out)
        self.pooling.fill_rows(out)
        self.faults.fill_rows(out.new_rows)

    def forget_steps(self) -> None:
        """Wait for the device, and forget the steps that were launched and not collected.

        For a core that is made anew after an interrupted step: its rows enter slots as new ones.
        """
        if self.draft_runner is not None:
            self.draft_runner.forget_steps()
