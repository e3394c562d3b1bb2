"""Rules over a history that is on the device: in torch and by the kernels, equal to rules that read the host's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_steps import RandomSteps

pytest.importorskip("triton")

from sampling_tables import new_table

from inflight.device.batch_state import BatchState
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import gpu_bad_words, gpu_penalties
from inflight.kernels.gpu.gpu_sampling import GpuSampling
from inflight.runner.step_rows import StepRows
from inflight.sampling import SamplingTable, ops, sampler
from inflight.sampling.reference_sampling import ReferenceSampling
from inflight.sampling.rules import DEVICE_RULES

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 37
KINDS: list[dict[str, Any]] = [
    dict(repetition_penalty=1.17),
    dict(frequency_penalty=0.33, presence_penalty=-0.71),
    dict(repetition_penalty=0.8, frequency_penalty=0.1),
    dict(),
    dict(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2.0}),
    dict(bad_words_ids=[[5], [9, 9], [7, 7, 7]]),
]


def device_table_of(max_num_seqs: int, vocab_size: int, kernel: bool) -> SamplingTable:
    """With rules whose edits are applied by kernels, or by their definitions."""
    if kernel:
        return SamplingTable(max_num_seqs, vocab_size, DEVICE, DEVICE_RULES, GpuSampling())
    return SamplingTable(max_num_seqs, vocab_size, CPU, DEVICE_RULES, ReferenceSampling())


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.booleans())
def test_logits_equal_those_of_the_host_s_counts(monkeypatch, seed: int, kernel: bool) -> None:
    """Bit for bit: slots that change hands, drafts that are refused, histories that come back."""
    monkeypatch.setattr(gpu_penalties, "_COUNTED_BLOCK", 16)
    monkeypatch.setattr(ops, "_FIRST_ROWS", 1)
    limits, rng = (4, 30, 4), random.Random(seed)
    state, steps = BatchState(*limits, CPU), RandomSteps(rng, *limits, VOCAB)
    device = DEVICE if kernel else CPU
    host_table, device_table = new_table(4, VOCAB), device_table_of(4, VOCAB, kernel)
    for _ in range(10):
        out = steps.step()
        state.fill_rows(out)
        for row in out.new_rows:
            params = SamplingParams(temperature=0.0, **rng.choice(KINDS))
            for table in (host_table, device_table):
                table.set_row(row.slot, params, row.seed, [], row.num_prompt_tokens)
        rows = StepRows.of(out)
        where = rows.slot_of_logits, rows.position_of_logits + 1
        logits = torch.randn(rows.size.logits, VOCAB, generator=torch.Generator().manual_seed(seed))
        expected = sampler.edit_logits(logits, host_table.select(*where, state.token_ids))
        # The device has the tokens when the edit is applied, not when it is prepared.
        history = torch.full((5, state.token_ids.shape[1]), 10**6, dtype=torch.int32, device=device)
        metadata = device_table.select(*where, history=history)
        history[:4] = torch.from_numpy(state.token_ids)
        assert torch.equal(sampler.edit_logits(logits.to(device), metadata).cpu(), expected)
        sampled = np.array(steps.tokens(rows.size.logits), dtype=np.int64)
        state.put_tokens(*where, sampled)
        steps.take(out, sampled)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.booleans())
def test_bad_words_equal_those_that_the_host_matches(monkeypatch, seed: int, kernel: bool) -> None:
    """With four tokens most heads match somewhere; a step may be lost between `prepare` and `apply`."""
    monkeypatch.setattr(gpu_bad_words, "_BLOCK", 4)
    limits, rng, vocab = (4, 30, 4), random.Random(seed), 4
    state, steps = BatchState(*limits, CPU), RandomSteps(rng, *limits, vocab)
    device = DEVICE if kernel else CPU
    host_table, device_table = new_table(4, vocab), device_table_of(4, vocab, kernel)
    num_banned = 0
    for _ in range(12):
        out = steps.step()
        state.fill_rows(out)
        for row in out.new_rows:
            words = [[rng.randrange(vocab) for _ in range(rng.randint(0, 4))] for _ in range(rng.randrange(12))]
            params = SamplingParams(temperature=0.0, bad_words_ids=words)
            for table in (host_table, device_table):
                table.set_row(row.slot, params, row.seed, [], row.num_prompt_tokens)
        rows = StepRows.of(out)
        where = rows.slot_of_logits, rows.position_of_logits + 1
        logits = torch.randn(rows.size.logits, vocab, generator=torch.Generator().manual_seed(seed))
        expected = sampler.edit_logits(logits, host_table.select(*where, state.token_ids))
        history = torch.full((5, state.token_ids.shape[1]), 10**6, dtype=torch.int32, device=device)
        metadata = device_table.select(*where, history=history)
        if rng.random() < 0.2:
            metadata = device_table.select(*where, history=history)
        history[:4] = torch.from_numpy(state.token_ids)
        got = sampler.edit_logits(logits.to(device), metadata).cpu()
        assert torch.equal(got, expected)
        num_banned += int(got.isinf().sum())
        sampled = np.array(steps.tokens(rows.size.logits), dtype=np.int64)
        state.put_tokens(*where, sampled)
        steps.take(out, sampled)
    assert num_banned > 0


def test_words_are_uploaded_when_they_change() -> None:
    table = new_table(2, VOCAB, "cpu", DEVICE_RULES)
    table.set_row(0, SamplingParams(temperature=0.0, bad_words_ids=[[i, i + 1] for i in range(30)]), 0, [], 3)
    history, sizes = torch.zeros(3, 50, dtype=torch.int32), []
    for step in range(4):
        if step == 2:
            table.set_row(1, SamplingParams(temperature=0.0, bad_words_ids=[[4]]), 0, [], 3)
        uploaded: list[np.ndarray] = []
        metadata = table.select(
            [0],
            [7 + step],
            put=lambda array, to=uploaded: to.append(array) or torch.from_numpy(array),
            history=history,
        )
        sampler.edit_logits(torch.zeros(1, VOCAB), metadata)
        sizes.append(sum(array.nbytes for array in uploaded))
    assert sizes[0] > 500 < sizes[2]
    assert sizes[1] == sizes[3] < 50


def test_a_step_uploads_as_much_for_a_long_history_as_for_a_short_one() -> None:
    sizes = []
    for length in (5, 5000):
        table = new_table(1, VOCAB, "cpu", DEVICE_RULES)
        table.set_row(0, SamplingParams(temperature=0.0, repetition_penalty=1.1), 0, [], length)
        uploaded: list[np.ndarray] = []
        table.select(
            [0],
            [length],
            put=lambda array, to=uploaded: to.append(array) or torch.from_numpy(array),
            history=torch.zeros(2, length + 1, dtype=torch.int32),
        )
        sizes.append(sum(array.nbytes for array in uploaded))
    assert sizes[0] == sizes[1] < 100


def test_count_rows_are_for_slots_that_ask_and_are_used_again() -> None:
    table = new_table(100, VOCAB, "cpu", DEVICE_RULES)
    asks, plain = SamplingParams(temperature=0.0, presence_penalty=1.0), SamplingParams(temperature=0.0)
    history, logits = torch.zeros(101, 50, dtype=torch.int32), torch.zeros(10, VOCAB)

    def count_rows(slots: list[int]) -> int:
        (edit,) = table.select(slots, [9] * len(slots), history=history).edits
        sampler.edit_logits(logits[: len(slots)], table.select(slots, [9] * len(slots), history=history))
        return len(edit.table.counts)

    for slot in range(100):
        table.set_row(slot, asks if slot < 3 else plain, 0, [], 5)
    assert table.select(range(3, 13), [9] * 10, history=history).edits == []
    assert count_rows([0, 1, 2]) == 8
    for turn in range(30):
        table.set_row(10 * turn % 100, asks, 0, [], 5)
        table.set_row(10 * turn % 100, plain, 0, [], 5)
    assert count_rows([1, 2]) == 8


def test_a_request_without_penalties_after_one_with_them_is_left_alone() -> None:
    table = new_table(1, VOCAB, "cpu", DEVICE_RULES)
    table.set_row(0, SamplingParams(temperature=0.0, repetition_penalty=2.0), 0, [], 5)
    table.set_row(0, SamplingParams(temperature=0.0), 0, [], 5)
    assert table.select([0], [7]).edits == []
