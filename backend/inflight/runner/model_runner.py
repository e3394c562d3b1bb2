"""Owns the device: batch state -> forward -> logits -> tokens."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import forward_context
from inflight.config import EngineConfig
from inflight.device.batch_state import StepInputs
from inflight.device.memory import Outcome, attempt
from inflight.device.upload import upload
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.runner.base_runner import BaseRunner, load_on_threads
from inflight.runner.row_faults import fail_rows, run_without_faulty_rows
from inflight.runner.step_output import step_output
from inflight.sampling import SamplingMetadata
from inflight.sampling.rules import RULES

__all__ = ["ModelRunner"]


class ModelRunner(BaseRunner):
    """Runs ragged batches of one checkpoint on one device, each to its end before the next.

    Implements `Runner` (engine/core.py).  `pipeline.ThreadedRunner` calls `prepare` and `execute` from two
    threads.

    Args:
        config: engine options; the checkpoint is loaded and the KV pool allocated here.

    Raises:
        LoadError, ConfigError: see `loader.load`.
    """

    def __init__(self, config: EngineConfig) -> None:
        loaded = load_on_threads(config)
        super().__init__(config, loaded, RULES)
        loaded.allocate(lambda out: self.execute(out, self.prepare(out)))
        self.host_cache = loaded.host_cache

    def launch(self, out: SchedulerOutput) -> StepOutput:
        """Run the step: one forward pass over the batch, then a token for each row that samples."""
        return self.execute(out, self.prepare(out))

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket

    def prepare(self, out: SchedulerOutput) -> Outcome[StepInputs]:
        """All of the step's tensors that need no token of the previous step, which can still be running."""
        self.state.apply(out)
        return attempt(lambda: self.state.step_inputs(out), self.device)

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput, prepared: Outcome[StepInputs]) -> StepOutput:
        """Run a prepared step; its tokens are in the batch state when this returns.

        A step that runs out of memory fails alone: its copies are made, its rows are in their slots, its tokens are
        missing, and the next step can run.  A row that raises fails alone, too.
        """
        started = time.monotonic()
        if self.host_cache is not None:
            self.host_cache.swap(out)
        self.fill_rows(out)
        self.forced.fill_rows(out.new_rows, self.faults.of([row.slot for row in out.new_rows]))
        inputs, failure = prepared
        step = None
        if inputs is not None:
            step, failure = attempt(lambda: run_without_faulty_rows(self._run, out, inputs, self.device), self.device)
        if step is None:
            step = StepOutput(failure=failure)
        else:
            fail_rows(step, self.faults.of(out.slots))
        step.started, step.ended = started, time.monotonic()
        return step

    def _run(self, out: SchedulerOutput, inputs: StepInputs) -> StepOutput:
        for hook in self.hooks:
            hook.step(out, inputs.metadata)
        asked = self.prompt_logprobs.asked(out, inputs.metadata.query_start_loc_cpu)
        inputs, pooled = self.pooling.split(out, inputs)
        inputs, forced = self.forced.split(out, inputs)
        keep, ask, read = (upload(one, self.device) for one in (inputs.logits_indices, asked.indices, pooled.indices))
        input_ids, slots = self.state.input_ids(inputs), inputs.slot_of_token[inputs.logits_indices]
        positions = inputs.position_of_token[inputs.logits_indices] + 1
        sampling = self.table.select(slots, positions, self.state.token_ids)  # masks are made while the model runs
        with forward_context(inputs.metadata, self.backend):
            logits, more, hidden = self.forward.run(input_ids, inputs.positions, keep, ask, read)
        forward_end = time.monotonic()
        step = forced.completed(self._sample(forced.out, inputs, logits, sampling, slots, positions))
        step.prompt_logprobs = asked.launch(more, upload(asked.next_token_ids, self.device)).take()
        step.forward_end = forward_end
        self.pooling.launch(pooled, hidden).give(step)
        return step

    def _sample(
        self,
        out: SchedulerOutput,
        inputs: StepInputs,
        logits: Tensor,
        sampling: SamplingMetadata,
        slots: np.ndarray,
        positions: np.ndarray,
    ) -> StepOutput:
        """The target's own choice at each of the N logits: of `slots` int64 [N], for `positions` int64 [N]."""
        rows = inputs.row_of_logits
        if not len(rows):
            return step_output(out, rows, rows)
        result = self.sampler(logits, sampling)
        sampled = result.token_ids.cpu().numpy()
        self.state.put_tokens(slots, positions, np.maximum(sampled, 0))  # a step launched ahead may embed any of them
        return step_output(out, rows, sampled, result)
