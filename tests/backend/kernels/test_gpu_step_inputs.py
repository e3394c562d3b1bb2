"""A step's inputs by the kernel, by its definition in torch, and by the host's batch state: the same, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_steps import RandomSteps

pytest.importorskip("triton")

from inflight.engine.step import SchedulerOutput
from inflight.kernels.gpu import gpu_step_inputs
from inflight.runner.batch_state import BatchState
from inflight.runner.step_inputs import DeviceState, Line, StepInputTensors, StepSize, make_inputs, put_tokens
from inflight.runner.step_rows import RowWriter, StepRows
from inflight.runner.step_upload import StepUpload, upload_bytes

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 97


class Side:
    """One implementation's tensors; `definition` or the kernel."""

    def __init__(self, device: torch.device, limits: tuple[int, int, int], num_bytes: int, definition: bool) -> None:
        self.definition = definition
        self.state = DeviceState.allocate(*limits, device)
        self.out = StepInputTensors.allocate(limits[0] * limits[1] + 8, self.state)
        for tensor in (self.out.input_ids, self.out.positions, self.out.slot_mapping, self.out.logits_indices):
            tensor.fill_(-99)
        self.upload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def run(self, size: StepSize, rows: RowWriter, out: SchedulerOutput, numbers: StepRows, host: torch.Tensor) -> None:
        upload = StepUpload(host, self.upload)
        lines, device_lines, blocks = rows.write(out, numbers, size, upload)
        new_tokens = rows.write_tokens(out, lines, upload)
        upload.copy()
        make = make_inputs if self.definition else gpu_step_inputs.make_inputs
        make(size, device_lines, blocks, new_tokens, self.state, self.out)

    def put(self, count: int, sampled: torch.Tensor) -> None:
        put = put_tokens if self.definition else gpu_step_inputs.put_tokens
        put(self.state.token_ids, self.out.sample_indices[:count], sampled.to(self.state.token_ids.device))


def check_step(size: StepSize, numbers: StepRows, out: SchedulerOutput, state: BatchState, sides: list[Side]) -> None:
    inputs = state.step_inputs(out)
    expected = {
        "input_ids": state.input_ids(inputs)[0],
        "positions": inputs.positions[0],
        "slot_mapping": inputs.metadata.slot_mapping,
        "logits_indices": torch.from_numpy(inputs.logits_indices),
    }
    padding = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "logits_indices": 0}
    for side in sides:
        for name, values in expected.items():
            got = getattr(side.out, name).cpu()
            padded = size.logits if name == "logits_indices" else size.tokens
            assert torch.equal(got[: len(values)], values), name
            assert torch.equal(got[len(values) : padded], torch.full((padded - len(values),), padding[name])), name
            if name != "logits_indices":
                assert (got[padded:] == -99).all() or padded < len(values), f"{name}: written behind the padding"
        for row, seq_len in enumerate(inputs.metadata.seq_lens_cpu):
            used = -(-seq_len // state.block_size)
            assert torch.equal(side.out.block_table[row, :used].cpu(), inputs.metadata.block_table[row, :used])
    assert np.array_equal(numbers.row_of_logits, inputs.row_of_logits)
    assert np.array_equal(numbers.slot_of_logits, inputs.slot_of_token[inputs.logits_indices])
    assert np.array_equal(numbers.position_of_logits, inputs.position_of_token[inputs.logits_indices])


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from([(5, 24, 4), (3, 40, 1), (6, 17, 16)]), st.booleans())
def test_kernel_definition_and_host_agree(monkeypatch, seed, limits, tiny_upload) -> None:
    """Also where new tokens do not fit the packed copy, and where a step is launched for more than its size."""
    monkeypatch.setattr(gpu_step_inputs, "_BLOCK", 8)
    rng = random.Random(seed)
    max_num_seqs = limits[0]
    num_bytes = 512 if tiny_upload else upload_bytes(max_num_seqs, 1)
    host = torch.zeros(num_bytes, dtype=torch.uint8)
    sides = [Side(CPU, limits, num_bytes, definition=True), Side(DEVICE, limits, num_bytes, definition=False)]
    state = BatchState(*limits, CPU)
    rows, steps = RowWriter(state, max_num_seqs), RandomSteps(rng, *limits, VOCAB)
    for _ in range(6):
        out = steps.step()
        state.apply(out)
        rows.apply(out)
        state.fill_rows(out)
        numbers = StepRows.of(out)
        real = numbers.size
        padded_rows = rng.randint(real.rows, max_num_seqs)
        size = StepSize(padded_rows, real.tokens + rng.randrange(9), real.logits + rng.randrange(9))
        for side in sides:
            for name in ("input_ids", "positions", "slot_mapping"):
                getattr(side.out, name)[:] = -99
            side.run(size, rows, out, numbers, host)
        rows.sent(numbers)
        check_step(size, numbers, out, state, sides)
        sampled = torch.tensor(steps.tokens(size.logits), dtype=torch.int64)
        for side in sides:
            side.put(size.logits, sampled)
        own = sampled[: real.logits].numpy()
        state.put_tokens(numbers.slot_of_logits, numbers.position_of_logits + 1, own)
        steps.take(out, own)
        for side in sides:
            assert np.array_equal(side.state.token_ids[:-1].cpu().numpy(), state.token_ids)


def test_the_kernel_numbers_its_lines_as_the_host_does() -> None:
    for line in list(Line)[1:]:
        assert getattr(gpu_step_inputs, line.name).value == line.value
    assert Line.SLOT == 0
    assert len(Line) == 8


def test_blocks_that_were_not_sent_come_again() -> None:
    """A step that fails before its rows are sent must leave no hole: the next one would write to others' blocks."""
    limits = (2, 16, 4)
    state = BatchState(*limits, CPU)
    rows, side = RowWriter(state, 2), Side(CPU, limits, 2048, definition=True)
    host = torch.zeros(2048, dtype=torch.uint8)
    steps = RandomSteps(random.Random(3), *limits, VOCAB)
    for index in range(8):
        out = steps.step()
        state.apply(out)
        rows.apply(out)
        state.fill_rows(out)
        numbers = StepRows.of(out)
        if index % 2:
            side.run(numbers.size, rows, out, numbers, host)
            rows.sent(numbers)
            for slot in out.slots:
                used = int(state.num_blocks[slot])
                assert side.state.block_table[slot, :used].tolist() == state.block_table[slot, :used].tolist()
        steps.take(out, np.array(steps.tokens(numbers.size.logits)))
