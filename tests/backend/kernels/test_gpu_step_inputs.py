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

from step_inputs_rig import CPU, VOCAB, Side, compare_steps

from inflight.device.batch_state import BatchState
from inflight.kernels.gpu import gpu_step_inputs
from inflight.runner.step_inputs import Line
from inflight.runner.step_rows import RowWriter, StepRows
from inflight.runner.step_upload import upload_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from([(5, 24, 4), (3, 40, 1), (6, 17, 16)]), st.booleans())
def test_kernel_definition_and_host_agree(monkeypatch, seed, limits, tiny_upload) -> None:
    """Also where new tokens do not fit the packed copy, and where a step is launched for more than its size."""
    monkeypatch.setattr(gpu_step_inputs, "_BLOCK", 8)
    num_bytes = 512 if tiny_upload else upload_bytes(limits[0], 1)
    compare_steps(random.Random(seed), limits, num_bytes, DEVICE)


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
