"""Steps without waits of the host: sampled tokens stay on the device, and a pinned ring brings them back.

    launch    host     update the state; write rows, new blocks and sampling parameters to a pinned buffer
              device   copy | make_inputs -> forward -> sample -> put_tokens | tokens to the ring, event
    collect   host     wait for the event; tokens to the batch state and into a `StepOutput`

One thread launches step n + 1 while step n runs.  Its positions come from the schedule, and its input tokens from
`DeviceState.token_ids`, where step n leaves them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, forward_context
from inflight.config import EngineConfig
from inflight.device.device_queue import DeviceEvent, DeviceQueue, queue_of
from inflight.device.memory import attempt
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.loading.loaded_model import LoadedModel
from inflight.runner.base_runner import BaseRunner, load_on_threads
from inflight.runner.graphs import Padding, decode_graphs
from inflight.runner.pooling import PendingVectors, PooledRows
from inflight.runner.prompt_logprobs import AskedPositions, PendingPromptLogprobs
from inflight.runner.row_faults import fail_rows
from inflight.runner.step_inputs import DeviceState, Line, StepInputTensors, StepSize, make_inputs, put_tokens
from inflight.runner.step_output import step_output
from inflight.runner.step_rows import RowWriter, StepRows
from inflight.runner.step_upload import StepUpload, upload_bytes
from inflight.sampling import SamplerOutput, SamplingMetadata
from inflight.sampling.metadata import COLUMN_LINES
from inflight.sampling.rules import DEVICE_RULES

__all__ = ["DeviceRunner", "DeviceStep"]

_RING = 2  # steps that are launched and not collected


@dataclass(slots=True)
class DeviceStep:
    """A step as the device needs it: tensors that have their contents once `upload.copy()` has run, and host ints.

    Steps of one `size` have these tensors at the same addresses, except for `asked_indices`, `next_token_ids` and
    those of `sampling.edits`, which only some steps have, and for `new_blocks` and what follows it if there are more
    than `size.new_blocks`.

    Attributes:
        size: of all tensors, padding included.
        lines: int32 [len(Line), at least size.rows + 1]; new_blocks, new_tokens: int32; see `make_inputs`.
        metadata: its tensors are views of `lines` and of `StepInputTensors`.
        sampling: for the step's logits.
        asked: positions with requested prompt log probabilities, with two of its arrays on the device.
        pooled: rows that yield vectors, with the tokens that they read on the device.
    """

    size: StepSize
    upload: StepUpload
    lines: Tensor
    new_blocks: Tensor
    new_tokens: Tensor
    metadata: AttentionMetadata
    sampling: SamplingMetadata
    asked: AskedPositions
    asked_indices: Tensor
    next_token_ids: Tensor
    pooled: PooledRows
    pooled_indices: Tensor

    @property
    def graph_key(self) -> Hashable:
        """Equal for steps whose graphs would be equal; None for a step with parts that no graph has."""
        new_blocks, columns = self.new_blocks, self.sampling.columns
        if self.asked.counts or len(self.pooled.indices) or len(new_blocks) > self.size.new_blocks or columns is None:
            return None
        tensors = self.lines, new_blocks, self.new_tokens, columns
        return self.size, *(tensor.data_ptr() for tensor in tensors)


@dataclass(slots=True, eq=False)
class _Buffers:
    """One place of the ring, in pinned memory.

    Attributes:
        upload: uint8; what `StepUpload` copies from.
        token_ids: int64 [max_num_batched_tokens]; the step's samples.
        owner: the step that uses it, until the device has ended it and its tokens were read.
    """

    upload: Tensor
    token_ids: Tensor
    owner: _Ticket | None = None


@dataclass(slots=True, eq=False)
class _Ticket:
    """A step from launch to collect.

    Attributes:
        launched: seconds, when its launch began.
        admissions: int64 [N]; how many requests the slot of each logit had had.
        started, forward_end, ended: when the device reached each point; in a graph, the forward pass has no own end.
        row_failures: rows whose rules raised, and why.
        pooled: rows that yield vectors.
        sampled, prompt_logprobs, vectors: the device's output, set once its work is launched.
        result: set once the step is read.
    """

    out: SchedulerOutput
    rows: StepRows
    pooled: PooledRows
    buffers: _Buffers
    launched: float
    admissions: np.ndarray
    started: DeviceEvent
    forward_end: DeviceEvent
    ended: DeviceEvent
    failure: str = ""
    row_failures: dict[int, str] = field(default_factory=dict)
    has_forward_end: bool = False
    sampled: SamplerOutput | None = None
    prompt_logprobs: PendingPromptLogprobs = field(default_factory=lambda: PendingPromptLogprobs({}, []))
    vectors: PendingVectors = field(default_factory=PendingVectors)
    result: StepOutput | None = None


class DeviceRunner(BaseRunner):
    """Implements `Runner` (engine/core.py); all of its methods are called in one thread.

    Args:
        config: engine options; the checkpoint is loaded and the KV pool allocated here.
        loaded, queue: the checkpoint and its device's queue, if not those of `config`: for tests.

    Raises:
        LoadError, ConfigError: see `loader.load`.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel | None = None, queue: DeviceQueue | None = None
    ) -> None:
        loaded = loaded or load_on_threads(config)
        super().__init__(config, loaded, DEVICE_RULES)
        info, device = self.info, self.device
        slots, tokens = config.max_num_seqs, config.step_tokens
        self.queue = queue or queue_of(device)
        self.rows = RowWriter(self.state, slots)
        self.device_state = DeviceState.allocate(slots, info.max_model_len, config.block_size, device)
        self.inputs = StepInputTensors.allocate(tokens, self.device_state)
        num_bytes = upload_bytes(slots, tokens)
        self._upload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._ring = [self._new_buffers(num_bytes, tokens) for _ in range(_RING)]
        self._num_launched = 0
        self._in_flight: deque[_Ticket] = deque()
        self._admissions = np.zeros(slots, dtype=np.int64)  # requests that each slot has had
        self._last_end = 0.0
        capturable = all(hook.capturable for hook in self.hooks)
        self.graphs = decode_graphs(config, self.backend, device, self._padding, capturable, bool(self.adapters))
        loaded.allocate(lambda out: self.collect(self.launch(out)), self.graphs)
        self.host_cache = loaded.host_cache

    @torch.inference_mode()
    def launch(self, out: SchedulerOutput) -> _Ticket:
        """Launch a step; waits for the device only if a rule reads tokens that are in flight.

        A step that runs out of memory fails alone: its copies are made, and the next step can run.
        """
        launched = time.monotonic()
        host_cache = self.host_cache
        if host_cache is not None:
            self.queue.submit(lambda: host_cache.swap(out))
        self._update_state(out)
        pooled = self.pooling.rows(out, np.cumsum([0, *out.num_scheduled_tokens]).tolist())
        adapted = any(adapters.adapts(out) for adapters in self.adapters)
        rows = StepRows.of(pooled.without_logits(out), adapted)
        if self._in_flight and self.table.reads_tokens(rows.slot_of_logits):
            self.num_collected_first += 1
            self._read_all()
        buffers = self._next_buffers()
        started, forward_end, ended = (self.queue.event() for _ in range(3))
        admissions = self._admissions[rows.slot_of_logits]
        ticket = buffers.owner = _Ticket(out, rows, pooled, buffers, launched, admissions, started, forward_end, ended)
        _, ticket.failure = attempt(lambda: self._launch(ticket), self.device)
        if ticket.failure:
            self.queue.submit(ticket.ended.record)
        self._in_flight.append(ticket)
        return ticket

    def collect(self, ticket: _Ticket) -> StepOutput:
        """Wait for this step's tokens, but for nothing that was launched after it."""
        self._read(ticket)
        assert ticket.result is not None
        return ticket.result

    def forget_steps(self) -> None:
        super().forget_steps()
        end = self.queue.event()
        self.queue.submit(end.record)
        end.synchronize()
        self._in_flight.clear()
        for buffers in self._ring:
            buffers.owner = None

    def size_of(self, rows: StepRows) -> StepSize:
        """The sizes with which to launch a step: its graph's, or its own."""
        size = rows.size
        return self.graphs.bucket(size) or size

    def padding_step(self, size: StepSize) -> DeviceStep:
        """A step of `size` without rows; its upload must be copied before another step is launched."""
        nothing = SchedulerOutput()
        return self._stage(nothing, StepRows.of(nothing), PooledRows(), size, self._next_buffers().upload)

    def _padding(self, size: StepSize) -> Padding:
        step = self.padding_step(size)
        step.upload.copy()
        return Padding(step.graph_key, lambda: self._outputs(step))

    # -- on the device: tensors at fixed addresses and host ints only ------------------------

    def forward_step(self, step: DeviceStep) -> tuple[Tensor, Iterable[Tensor], Tensor]:
        """Make the step's inputs and run the model: see `ForwardPass`."""
        size, inputs = step.size, self.inputs
        make_inputs(size, step.lines, step.new_blocks, step.new_tokens, self.device_state, inputs)
        tokens, positions = inputs.input_ids[: size.tokens], inputs.positions[: size.tokens]
        keep, asked = inputs.logits_indices[: size.logits], step.asked_indices
        try:
            for adapters in self.adapters:
                adapters.expect(size.tokens if size.adapted else 0)
            with forward_context(step.metadata, self.backend):
                return self.forward.run(tokens[None], positions[None], keep, asked, step.pooled_indices)
        finally:  # the check at load calls the model by itself, after graphs were measured
            for adapters in self.adapters:
                adapters.expect(0)

    def finish_step(self, step: DeviceStep, logits: Tensor) -> SamplerOutput:
        """Sample, and put the tokens where the next step finds them.  Doing it again changes nothing."""
        sampled = self.sampler(logits, step.sampling)
        put_tokens(self.device_state.token_ids, self.inputs.sample_indices[: step.size.logits], sampled.token_ids)
        return sampled

    def _outputs(self, step: DeviceStep) -> tuple[Tensor, Tensor]:
        """The outputs of a graph: logits [size.logits, V], and a token for each as its column says."""
        logits, *_ = self.forward_step(step)
        return logits, self.finish_step(step, logits).token_ids

    def _replayed(self, step: DeviceStep) -> tuple[Tensor, Iterable[Tensor], Tensor, SamplerOutput | None] | None:
        """Run the step by its graph, if it has one: the result of `forward_step`, and the sampled tokens.

        Masks, edits and log probabilities differ from step to step and are in no graph.  A step that has them is
        sampled again, from the graph's logits, and the tokens that the graph put are overwritten.
        """
        outputs = self.graphs.replay(step.graph_key)
        if outputs is None:
            return None
        logits, token_ids = outputs
        plain = not (step.sampling.masks or step.sampling.edits or step.sampling.logprobs)
        return logits, (), logits[:0], SamplerOutput(token_ids, [], None) if plain else None

    # -- launch --------------------------------------------------------------------------------

    def _update_state(self, out: SchedulerOutput) -> None:
        self.state.apply(out)
        self.rows.apply(out)
        self.fill_rows(out)
        for row in out.new_rows:
            self._admissions[row.slot] += 1

    def _launch(self, ticket: _Ticket) -> None:
        out, rows = ticket.out, ticket.rows
        try:
            step = self._stage(out, rows, ticket.pooled, self.size_of(rows), ticket.buffers.upload)
        except BaseException:  # possibly raised by a rule
            slots, positions, history = rows.slot_of_logits, rows.position_of_logits + 1, self.device_state.token_ids
            if not self.faults.find(slots, positions, self.state.token_ids, history):
                raise
            step = self._stage(out, rows, ticket.pooled, self.size_of(rows), ticket.buffers.upload)
        ticket.row_failures = self.faults.of(out.slots)
        self.queue.submit(lambda: self._run(step, ticket))
        self.rows.sent(ticket.rows)

    def _stage(
        self, out: SchedulerOutput, rows: StepRows, pooled: PooledRows, size: StepSize, host: Tensor
    ) -> DeviceStep:
        """Write all data of the host about a step to `host`, pinned."""
        upload = StepUpload(host, self._upload)
        lines, device_lines, new_blocks = self.rows.write(out, rows, size, upload)
        slots, positions = rows.slot_of_logits, rows.position_of_logits + 1
        columns, device_columns = upload.reserve((COLUMN_LINES, size.logits), np.int64)
        self.table.fill_columns(columns, slots, positions)
        new_tokens = self.rows.write_tokens(out, size, lines, upload)
        history = self.device_state.token_ids
        sampling = self.table.select(slots, positions, self.state.token_ids, upload.put, history, device_columns)
        starts = lines[Line.QUERY_START, : size.rows + 1].tolist()
        asked = self.prompt_logprobs.asked(out, starts)
        asked_indices, next_token_ids = upload.put(asked.indices), upload.put(asked.next_token_ids)
        pooled_indices = upload.put(pooled.indices)
        metadata = self._metadata(rows, size, starts, device_lines)
        return DeviceStep(
            size,
            upload,
            device_lines,
            new_blocks,
            new_tokens,
            metadata,
            sampling,
            asked,
            asked_indices,
            next_token_ids,
            pooled,
            pooled_indices,
        )

    def _metadata(self, rows: StepRows, size: StepSize, starts: list[int], lines: Tensor) -> AttentionMetadata:
        seq_lens = (rows.num_computed + rows.counts).tolist()
        max_seq_len = max(seq_lens, default=0)
        if size != rows.size:  # a kernel's plan on the host must fit every step of this size
            starts = [min(row * size.query_len, size.tokens) for row in range(size.rows + 1)]
            seq_lens, max_seq_len = [self.info.max_model_len] * size.rows, self.info.max_model_len
        return AttentionMetadata(
            query_start_loc=lines[Line.QUERY_START, : size.rows + 1],
            seq_lens=lines[Line.SEQ_LEN, : size.rows],
            block_table=self.inputs.block_table[: size.rows],
            slot_mapping=self.inputs.slot_mapping[: size.tokens],
            query_start_loc_cpu=starts,
            seq_lens_cpu=seq_lens,
            max_query_len=size.query_len,
            max_seq_len=max_seq_len,
            block_size=self.state.block_size,
        )

    @torch.inference_mode()
    def _run(self, step: DeviceStep, ticket: _Ticket) -> None:
        """The step's work on the device."""
        buffers, num_logits = ticket.buffers, len(ticket.rows.row_of_logits)
        ticket.started.record()
        step.upload.copy()
        for hook in self.hooks:
            hook.step(ticket.out, step.metadata)
        logits, more, hidden, sampled = self._replayed(step) or (*self.forward_step(step), None)
        if sampled is None:
            ticket.forward_end.record()
            ticket.has_forward_end = True
        if num_logits:
            ticket.sampled = sampled or self.finish_step(step, logits)
            buffers.token_ids[:num_logits].copy_(ticket.sampled.token_ids[:num_logits], non_blocking=True)
        if step.asked.counts:  # the entries outlive the upload, which the next step overwrites
            ticket.prompt_logprobs = step.asked.launch(more, step.next_token_ids.clone())
        ticket.vectors = self.pooling.launch(step.pooled, hidden)
        ticket.ended.record()

    def _new_buffers(self, num_bytes: int, max_num_tokens: int) -> _Buffers:
        token_ids = self.queue.host_buffer(8 * max_num_tokens).view(torch.int64)
        return _Buffers(self.queue.host_buffer(num_bytes), token_ids)

    def _next_buffers(self) -> _Buffers:
        """The next place of the ring; the device has ended the step that used it before."""
        buffers = self._ring[self._num_launched % len(self._ring)]
        self._num_launched += 1
        if buffers.owner is not None:
            self._read(buffers.owner)
        return buffers

    # -- collect -------------------------------------------------------------------------------

    def _read_all(self) -> None:
        for ticket in list(self._in_flight):
            self._read(ticket)

    def _read(self, ticket: _Ticket) -> None:
        """Wait for a step and store its tokens; once."""
        if ticket.result is not None:
            return
        started, ended = self._wait(ticket)
        step = StepOutput(failure=ticket.failure) if ticket.failure else self._output(ticket)
        step.started, step.ended = started, ended
        if not ticket.failure and ticket.has_forward_end:
            step.forward_end = started + ticket.started.elapsed_time(ticket.forward_end) / 1e3
        ticket.result = step
        ticket.buffers.owner = None
        self._in_flight.remove(ticket)

    def _output(self, ticket: _Ticket) -> StepOutput:
        rows = ticket.rows
        slots = rows.slot_of_logits
        token_ids = ticket.buffers.token_ids[: len(slots)].numpy().copy()
        # A slot that has a new request has that one's tokens.
        same = ticket.admissions == self._admissions[slots]
        self.state.put_tokens(slots[same], rows.position_of_logits[same] + 1, np.maximum(token_ids[same], 0))
        step = step_output(ticket.out, rows.row_of_logits, token_ids, ticket.sampled)
        step.prompt_logprobs = ticket.prompt_logprobs.take()
        ticket.vectors.give(step)
        fail_rows(step, ticket.row_failures)
        return step

    def _wait(self, ticket: _Ticket) -> tuple[float, float]:
        """When the device began the step and when it ended it, by the host's clock, in seconds."""
        was_over = ticket.ended.query()
        ticket.ended.synchronize()
        ended = time.monotonic()
        seconds = 0.0 if ticket.failure else ticket.started.elapsed_time(ticket.ended) / 1e3
        if was_over:  # it ended before the host looked
            ended = min(ended, max(self._last_end, ticket.launched) + seconds)
        self._last_end = ended
        return ended - seconds, ended
