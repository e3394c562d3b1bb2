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
    """Runs ragged batches of one checkpoint on one device, each to its end before the next.

    Implements `Runner` (engine/core.py).  `pipeline.ThreadedRunner` calls `prepare` and `execute` from two
    threads.

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
        self._num_prompt_logprobs: dict[int, int] = {}  # slot -> top entries, where asked

    def launch(self, out: SchedulerOutput) -> StepOutput:
        """Run the step: one forward pass over the batch, then a token for each row that samples."""
        return self.execute(out, self.prepare(out))

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket

    def prepare(self, out: SchedulerOutput) -> StepInputs:
        """All of the step's tensors that need no token of the step before, which may still run."""
        self.state.apply(out)
        return self.state.step_inputs(out)

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput, inputs: StepInputs) -> StepOutput:
        """Run a prepared step; its tokens are in the batch state when this returns."""
        started = time.monotonic()
        if self.host_cache is not None:
            self._swap(self.host_cache, out)
        self._fill_rows(out)
        asked = self._prompt_positions(out) if self._num_prompt_logprobs else {}
        logits = self._forward(inputs, asked)
        forward_end = time.monotonic()
        num_samples = len(inputs.logits_indices)
        step = self._sample(out, inputs, logits[:num_samples])
        self._add_prompt_logprobs(step, out, asked, logits[num_samples:])
        step.started, step.forward_end, step.ended = started, forward_end, time.monotonic()
        return step

    def _swap(self, host_cache: HostCache, out: SchedulerOutput) -> None:
        """Out before in: a block may be freed and given to a request that comes back in one step."""
        if out.swap_out:
            host_cache.swap_out(out.swap_out)
        if out.swap_in:
            host_cache.swap_in(out.swap_in)

    def _fill_rows(self, out: SchedulerOutput) -> None:
        self.state.fill_rows(out)
        for row in out.new_rows:
            self.table.set_row(row.slot, row.params, row.seed, self.info.eos_token_ids, row.num_prompt_tokens)
            self._num_prompt_logprobs.pop(row.slot, None)
            if row.params.prompt_logprobs is not None:
                self._num_prompt_logprobs[row.slot] = row.params.prompt_logprobs

    def _forward(self, inputs: StepInputs, asked: dict[int, tuple[int, int]]) -> Tensor:
        """Logits [N + P, V]: those to sample from, then those of the asked prompt positions."""
        query_start_loc = inputs.metadata.query_start_loc_cpu
        indices = [inputs.logits_indices]
        indices += [np.arange(query_start_loc[row], query_start_loc[row] + count) for row, (_, count) in asked.items()]
        keep = torch.from_numpy(np.concatenate(indices)).to(self.device)
        with forward_context(inputs.metadata, self.backend):
            out = self.model(
                input_ids=self.state.input_ids(inputs),
                position_ids=inputs.positions,
                use_cache=False,
                logits_to_keep=keep,
            )
        return out.logits[0]

    def _sample(self, out: SchedulerOutput, inputs: StepInputs, logits: Tensor) -> StepOutput:
        """The target's own choice at each of the N logits; drafts count while they equal it."""
        token_ids = np.full(len(out.slots), -1, dtype=np.int64)
        rows = inputs.row_of_logits
        if not len(rows):
            return StepOutput(token_ids.tolist())
        slots = inputs.slot_of_token[inputs.logits_indices]
        positions = inputs.position_of_token[inputs.logits_indices] + 1
        result = self.sampler(logits, self.table.select(slots, positions, self.state.token_ids))
        sampled = result.token_ids.cpu().numpy()
        self.state.put_tokens(slots, positions, sampled)
        token_ids[rows] = sampled
        step = StepOutput()
        for row, drafts in out.draft_token_ids.items():
            start = int(np.searchsorted(rows, row))
            step.token_runs[row] = _accepted(sampled[start : start + len(drafts) + 1].tolist(), drafts)
            token_ids[row] = -1
        step.token_ids = token_ids.tolist()
        for index, entry in result.logprobs.items():
            row = int(rows[index])
            entries = step.logprobs.setdefault(row, [])
            if len(entries) < len(step.token_runs.get(row, (0,))):
                entries.append(entry)
        return step

    def _prompt_positions(self, out: SchedulerOutput) -> dict[int, tuple[int, int]]:
        """row -> (first position, count): positions of this step that predict a prompt token, where asked."""
        asked = {}
        for row, slot in enumerate(out.slots):
            computed, num_prompt_tokens = out.num_computed_tokens[row], int(self.state.num_prompt_tokens[slot])
            if slot not in self._num_prompt_logprobs or computed >= num_prompt_tokens:
                continue
            last = min(computed + out.num_scheduled_tokens[row], num_prompt_tokens - 1)
            asked[row] = (computed, last - computed)
        return asked

    def _add_prompt_logprobs(
        self, step: StepOutput, out: SchedulerOutput, asked: dict[int, tuple[int, int]], logits: Tensor
    ) -> None:
        offset = 0
        for row, (first, count) in asked.items():
            slot = out.slots[row]
            tokens = self.state.token_ids[slot, first + 1 : first + 1 + count].astype(np.int64)
            entries: list[TokenLogprobs] = prompt_logprobs(
                logits[offset : offset + count],
                torch.from_numpy(tokens).to(self.device),
                self._num_prompt_logprobs[slot],
            )
            step.prompt_logprobs[row] = entries
            offset += count


def _accepted(sampled: list[int], drafts: list[int]) -> list[int]:
    """The target's tokens up to the first that is not the draft in its place: 1 to len(drafts) + 1 of them."""
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return sampled[: count + 1]
    return sampled
