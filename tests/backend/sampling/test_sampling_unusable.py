"""Logits that are not numbers: the row gives no token, and the rows beside it give theirs."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from logprobs_of import logprobs_of
from sampling_tables import new_table
from torch import Tensor

from inflight.engine.logprobs import Logprobs
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import StepOutput
from inflight.sampling import UNUSABLE_LOGITS, Sampler, candidates, fail_unusable_rows
from inflight.sampling.candidates import top_candidates
from inflight.sampling.unusable import NO_TOKEN

VOCAB = 301
pytestmark = pytest.mark.usefixtures("drawn_by")

NAN, INF = float("nan"), float("inf")
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=1e-4),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=5, top_p=0.7, min_p=0.01),
    SamplingParams(min_tokens=4, stop_token_ids=[7]),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 100.0}),
    SamplingParams(logprobs=2),
]


def choose(logits: Tensor, params: list[SamplingParams]) -> tuple[list[int], dict[int, list[tuple[int, float, int]]]]:
    table = new_table(len(params), VOCAB)
    for slot, sampling in enumerate(params):
        table.set_row(slot, sampling, slot, [9], 1)
    tokens = np.zeros((len(params), 2), dtype=np.int32)
    output = Sampler()(logits, table.select(np.arange(len(params)), np.ones(len(params), dtype=np.int64), tokens))
    return output.token_ids.tolist(), logprobs_of(output)


def random_logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)


# (where, what): NaN with its sign bit set is what 0 * inf gives on x86; 7 and 9 are masked by `min_tokens`.
POISONS = [(0, NAN), (VOCAB - 1, NAN), (200, -NAN), (7, NAN), (9, INF), (150, INF), (slice(None), -INF)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def poisoned() -> list[Any]:
    """Each kind with each poison and each dtype; `make test` has one dtype for each pair, in turns."""
    found = []
    for kind, (number, poison), index in product(range(len(KINDS)), enumerate(POISONS), range(len(DTYPES))):
        marks = () if (kind + number) % len(DTYPES) == index else pytest.mark.nightly
        found.append(pytest.param(kind, *poison, DTYPES[index], marks=marks))
    return found


@pytest.mark.parametrize(("kind", "where", "value", "dtype"), poisoned())
def test_only_the_row_itself_gives_no_token(kind: int, where: int | slice, value: float, dtype: torch.dtype) -> None:
    logits = random_logits(dtype)
    expected, _ = choose(logits, KINDS)
    assert min(expected) >= 0
    logits[kind, where] = value
    got, logprobs = choose(logits, KINDS)
    assert got[kind] == NO_TOKEN
    assert got[:kind] + got[kind + 1 :] == expected[:kind] + expected[kind + 1 :]
    assert set(logprobs) == {len(KINDS) - 1}


def test_all_rows_greedy() -> None:
    logits = random_logits()
    expected = logits.argmax(-1).tolist()
    logits[2, 40] = NAN
    greedy = [SamplingParams(temperature=0.0)] * len(KINDS)
    assert choose(logits, greedy)[0] == [NO_TOKEN if row == 2 else token for row, token in enumerate(expected)]


@pytest.mark.parametrize("params", KINDS[:7], ids=repr)
def test_a_row_that_masks_leave_without_a_token_still_gets_one(params: SamplingParams) -> None:
    """Only the model's own logits make a row unusable."""
    logits = torch.full((1, VOCAB), -INF)
    logits[0, 9] = 1.0  # EOS, masked by min_tokens
    masked = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, min_tokens=5
    )
    tokens, _ = choose(logits, [masked])
    assert tokens == [0]


@pytest.mark.parametrize("params", KINDS[:7], ids=repr)
def test_tokens_that_the_model_itself_masks_are_no_failure(params: SamplingParams) -> None:
    logits = torch.full((1, VOCAB), -INF)
    logits[0, [3, 200]] = torch.tensor([0.0, 0.5])
    assert choose(logits, [params])[0][0] in (3, 200)


def test_a_gpu_without_the_kernel_finds_every_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, candidates come by rank, and NaN with its sign bit set ranks last."""
    from inflight.sampling import choose as module

    monkeypatch.setattr(module, "top_candidates", lambda x, k: candidates._top_by_rank(x, k))
    logits = random_logits()
    logits[5, 200] = -NAN
    assert not top_candidates(logits[5:6], 1)[0].isfinite().all()
    assert candidates._top_by_rank(logits[5:6], 1)[0].isfinite().all()
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert choose(logits[5:6], KINDS[5:6])[0] == [NO_TOKEN]


def test_rows_with_drafts_fail_only_where_their_own_run_ends_so() -> None:
    """Row 1 refuses its first draft, row 2 accepts one and then has no token, row 4 samples without drafts."""
    rows = np.array([0, 1, 1, 2, 2, 2, 4])
    sampled = np.array([5, 6, NO_TOKEN, 7, NO_TOKEN, 8, NO_TOKEN])
    step = StepOutput(
        token_ids=[5, -1, -1, -1, -1],
        token_runs={1: [6], 2: [7, NO_TOKEN]},
        logprobs={1: Logprobs.of([[(6, -0.5, 1)]]), 2: Logprobs.of([[(7, -0.5, 1)]]), 4: Logprobs.of([[(0, NAN, 1)]])},
    )
    fail_unusable_rows(step, sampled, rows)
    assert step.row_failures == {2: UNUSABLE_LOGITS, 4: UNUSABLE_LOGITS}
    assert step.token_runs == {1: [6]}
    assert list(step.logprobs) == [1]
