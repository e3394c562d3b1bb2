"""Owns the device: batch state -> forward -> logits -> tokens."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import forward_context
from inflight.config import EngineConfig
from inflight.engine.messages import TokenLogprobs
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.loading.loader import load
from inflight.runner.batch_state import BatchState, StepInputs
from inflight.runner.swap import HostCache
from inflight.sampling import Sampler, SamplingTable, prompt_logprobs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs ragged batches of one checkpoint on one device.

    Args:
        config: engine options; the checkpoint is loaded and the KV pool allocated here.

    Raises:
        LoadError, ConfigError: see `loader.load`.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        loaded = load(config)
        self.info = loaded.info
        self.model = loaded.model
        self.backend = loaded.backend
        self.device = loaded.device
        self.host_cache = loaded.host_cache
        self.state = BatchState(config.max_num_seqs, self.info.max_model_len, config.block_size, self.device)
        self.table = SamplingTable(config.max_num_seqs, self.info.vocab_size, self.device)
        self.sampler = Sampler()
        self.sampler.warm_up(self.info.vocab_size, loaded.dtype, self.device)

    def prepare(self, out: SchedulerOutput) -> StepInputs:
        """All of the step's tensors that need no token of the step before, which may still run."""
        self.state.apply(out)
        return self.state.step_inputs(out)

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput, inputs: StepInputs) -> StepOutput:
        """One forward pass over the batch; samples the rows whose last known token it computes.

        Tokens sampled here are already in the batch state when this returns.
        """
        if self.host_cache is not None:
            self._swap(self.host_cache, out)
        self.state.fill_rows(out)
        for row in out.new_rows:
            self.table.set_row(row.slot, row.params, row.seed, self.info.eos_token_ids, row.num_prompt_tokens)
        rows = np.flatnonzero(out.samples)
        asked = self._prompt_positions(out)
        logits = self._forward(inputs, rows, asked)
        forward_end = time.monotonic()
        step = self._sample(out, rows, logits[: len(rows)])
        step.forward_end = forward_end
        self._add_prompt_logprobs(step, out, asked, logits[len(rows) :])
        return step

    def _swap(self, host_cache: HostCache, out: SchedulerOutput) -> None:
        """Out before in: a block may be freed and given to a request that comes back in one step."""
        if out.swap_out:
            host_cache.swap_out(out.swap_out)
        if out.swap_in:
            host_cache.swap_in(out.swap_in)

    def _forward(self, inputs: StepInputs, rows: np.ndarray, asked: dict[int, tuple[int, int]]) -> Tensor:
        """Logits [R', V]: one row per entry of `rows`, then those of the asked prompt positions."""
        starts = inputs.metadata.query_start_loc_cpu
        indices = [np.asarray(starts[1:], dtype=np.int64)[rows] - 1]
        indices += [np.arange(starts[row], starts[row] + count) for row, (_, count) in asked.items()]
        keep = torch.from_numpy(np.concatenate(indices)).to(self.device)
        with forward_context(inputs.metadata, self.backend):
            out = self.model(
                input_ids=self.state.input_ids(inputs),
                position_ids=inputs.positions,
                use_cache=False,
                logits_to_keep=keep,
            )
        return out.logits[0]

    def _sample(self, out: SchedulerOutput, rows: np.ndarray, logits: Tensor) -> StepOutput:
        token_ids = np.full(len(out.requests), -1, dtype=np.int64)
        if not len(rows):
            return StepOutput(token_ids.tolist())
        slots = np.asarray(out.slots, dtype=np.int64)[rows]
        metadata = self.table.select(slots, self.state.num_tokens[slots], self.state.token_ids)
        result = self.sampler(logits, metadata)
        sampled = result.token_ids.cpu().numpy()
        token_ids[rows] = sampled
        self.state.append_tokens(slots, sampled)
        return StepOutput(token_ids.tolist(), {int(rows[i]): entry for i, entry in result.logprobs.items()})

    def _prompt_positions(self, out: SchedulerOutput) -> dict[int, tuple[int, int]]:
        """row -> (first position, count): positions of this step that predict a prompt token, where asked."""
        asked = {}
        for row, request in enumerate(out.requests):
            computed = out.num_computed_tokens[row]
            if request.params.prompt_logprobs is None or computed >= request.num_prompt_tokens:
                continue
            last = min(computed + out.num_scheduled_tokens[row], request.num_prompt_tokens - 1)
            asked[row] = (computed, last - computed)
        return asked

    def _add_prompt_logprobs(
        self, step: StepOutput, out: SchedulerOutput, asked: dict[int, tuple[int, int]], logits: Tensor
    ) -> None:
        offset = 0
        for row, (first, count) in asked.items():
            tokens = self.state.token_ids[out.slots[row], first + 1 : first + 1 + count].astype(np.int64)
            entries: list[TokenLogprobs] = prompt_logprobs(
                logits[offset : offset + count],
                torch.from_numpy(tokens).to(self.device),
                out.requests[row].params.prompt_logprobs or 0,
            )
            step.prompt_logprobs[row] = entries
            offset += count
