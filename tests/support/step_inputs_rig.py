"""Compares a step's inputs by the kernel, by its definition in torch, and by the host's batch state."""

from __future__ import annotations

import random

import numpy as np
import torch
from random_steps import RandomSteps

from inflight.device.batch_state import BatchState
from inflight.engine.step import SchedulerOutput
from inflight.kernels.gpu import gpu_step_inputs
from inflight.runner.step_inputs import DeviceState, StepInputTensors, StepSize, make_inputs, put_tokens
from inflight.runner.step_rows import RowWriter, StepRows
from inflight.runner.step_upload import StepUpload

CPU = torch.device("cpu")
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
        new_tokens = rows.write_tokens(out, size, lines, upload)
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
                assert (got[padded:] == -99).all(), f"{name}: written behind the padding"
        for row, seq_len in enumerate(inputs.metadata.seq_lens_cpu):
            used = -(-seq_len // state.block_size)
            assert torch.equal(side.out.block_table[row, :used].cpu(), inputs.metadata.block_table[row, :used])
    assert np.array_equal(numbers.row_of_logits, inputs.row_of_logits)
    assert np.array_equal(numbers.slot_of_logits, inputs.slot_of_token[inputs.logits_indices])
    assert np.array_equal(numbers.position_of_logits, inputs.position_of_token[inputs.logits_indices])


def compare_steps(rng: random.Random, limits: tuple[int, int, int], num_bytes: int, device: torch.device) -> None:
    """Assert that the kernel on `device`, its definition and the host agree, bit for bit, for some steps.

    Args:
        limits: max_num_seqs, max_model_len, block_size.
        num_bytes: of the packed copy; arrays that do not fit are copied apart.
    """
    max_num_seqs = limits[0]
    host = torch.zeros(num_bytes, dtype=torch.uint8)
    sides = [Side(CPU, limits, num_bytes, definition=True), Side(device, limits, num_bytes, definition=False)]
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
        tokens, logits, entering = (count + rng.randrange(9) for count in (real.tokens, real.logits, real.new_tokens))
        size = StepSize(padded_rows, tokens, logits, real.query_len, entering)
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
