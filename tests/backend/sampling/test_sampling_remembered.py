"""The sequences of a request share what rules make of its lists."""

from __future__ import annotations

import pytest
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling.rules import LogitsRule
from inflight.sampling.rules.allowed_tokens import AllowedTokens
from inflight.sampling.rules.bad_words import BadWords
from inflight.sampling.rules.device_bad_words import DeviceBadWords
from inflight.sampling.rules.logit_bias import LogitBias
from inflight.sampling.rules.remembered import Remembered

V = 50
CASES: list[tuple[type[LogitsRule], SamplingParams, SamplingParams]] = [
    (AllowedTokens, SamplingParams(allowed_token_ids=[3, 4]), SamplingParams(allowed_token_ids=[3, V])),
    (LogitBias, SamplingParams(logit_bias={3: 1.0}), SamplingParams(logit_bias={V: 1.0})),
    (BadWords, SamplingParams(bad_words_ids=[[3], [4, 5]]), SamplingParams(bad_words_ids=[[V]])),
    (DeviceBadWords, SamplingParams(bad_words_ids=[[3], [4, 5]]), SamplingParams(bad_words_ids=[[V]])),
]


@pytest.mark.parametrize(("rule", "params", "wrong"), CASES)
def test_a_list_is_converted_once_for_all_sequences(
    rule: type[LogitsRule], params: SamplingParams, wrong: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(rule.__module__, fromlist=["check_token_ids"])
    check, checked = module.check_token_ids, []
    monkeypatch.setattr(module, "check_token_ids", lambda *args: checked.append(1) or check(*args))
    table = rule(8, V, torch.device("cpu"))
    assert all(table.set_row(slot, params, ()) for slot in range(4))
    assert len(checked) == 1
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(ValueError, match=f"token id {V} is not in the vocabulary"):
            table.set_row(5, wrong, ())
    assert table.set_row(6, params, ())
    assert not table.set_row(7, SamplingParams(), ())


def test_equal_values_are_not_taken_for_the_same_one() -> None:
    calls: list[list[int]] = []
    double = Remembered(lambda value: calls.append(value) or [2 * x for x in value])
    first, equal = [1, 2], [1, 2]
    assert double(first) == double(first) == double(equal) == [2, 4]
    assert len(calls) == 2
