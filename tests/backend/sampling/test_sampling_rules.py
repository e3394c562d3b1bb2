"""The rules one by one and mixed, against the definition of each; and what every rule must fulfil."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tables import describe, new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling import Sampler, SampleRow
from inflight.sampling.rules import RULES, LogitsRule
from inflight.sampling.rules.token_counts import TokenCounts
from inflight.sampling.sampler import edit_logits

V = 53


def make_row(params: SamplingParams, prompt=(), output=(), seed=0, eos=(0,)) -> SampleRow:
    prompt, output = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
    return SampleRow(params, seed, len(prompt) + len(output), prompt, output, eos)


def edited(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    return edit_logits(logits, describe(rows, logits.shape[-1]))


def masked(logits: torch.Tensor) -> list:
    """Indices of the entries that are minus infinity."""
    return torch.isinf(logits).nonzero().squeeze(-1).tolist()


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 4


token = st.integers(0, V - 1)
editing_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    allowed_token_ids=st.none() | st.lists(token, min_size=1, max_size=8),
    logit_bias=st.none() | st.dictionaries(token, st.floats(-50, 50, width=32), max_size=5),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(token, max_size=3),
    ignore_eos=st.booleans(),
    bad_words_ids=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
)
histories = st.tuples(st.lists(token, min_size=1, max_size=12), st.lists(st.integers(0, 6), max_size=12))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(editing_params, histories), min_size=1, max_size=5), st.integers(0, 10))
def test_edits_equal_the_reference(reference, drawn, seed):
    rows = [make_row(params, prompt, output, eos=(0, 7)) for params, (prompt, output) in drawn]
    logits = random_logits(len(rows), seed)
    metadata = describe(rows, V)
    after = edit_logits(logits, metadata)
    for row, before, got in zip(rows, logits.numpy(), after.numpy()):
        np.testing.assert_allclose(got, reference.edited(before, row), rtol=1e-6, atol=1e-6)
    if not metadata.edits:
        assert torch.equal(after, logits)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
class TestEveryRule:
    def metadata(self, rule: type[LogitsRule], num_rows: int = 1, row: int = 0):
        rows = [make_row(SamplingParams(temperature=0.0), [0]) for _ in range(num_rows)]
        rows[row] = make_row(rule.warm_up_params, [0], eos=())
        return describe(rows, V)

    def test_its_example_activates_it_alone(self, rule):
        table = new_table(1, V, rules=[rule])
        table.set_row(0, rule.warm_up_params, 0, [], 1)
        (edit,) = table.select([0], [1], np.zeros((1, 1), dtype=np.int32)).edits
        (same,) = self.metadata(rule).edits
        assert type(edit) is type(same)

    def test_it_changes_its_row_and_no_other(self, rule):
        logits = random_logits(3)
        after = edit_logits(logits, self.metadata(rule, 3, 1))
        assert torch.equal(after[[0, 2]], logits[[0, 2]])
        assert not torch.equal(after[1], logits[1])
        assert torch.equal(after[1], edit_logits(logits[1:2], self.metadata(rule))[0])

    def test_a_slot_filled_again_forgets_it(self, rule):
        table = new_table(1, V)
        table.set_row(0, rule.warm_up_params, 0, [], 1)
        table.set_row(0, SamplingParams(temperature=0.0), 0, [], 1)
        assert table.select([0], [1]).edits == []

    def test_its_edit_reads_no_value_on_the_host(self, rule):
        """A tensor without data raises where a GPU would make the host wait."""
        (edit,) = self.metadata(rule).edits
        values = {field.name: getattr(edit, field.name) for field in dataclasses.fields(edit)}
        fields = {name: value.to("meta") for name, value in values.items() if isinstance(value, torch.Tensor)}
        dataclasses.replace(edit, **fields).apply(torch.zeros(1, V, device="meta"))


class Grammar:
    """A rule as a grammar will be one: the next token must differ from the last by the row's `top_k`.

    It keeps an automaton per slot that only accepted tokens advance, and fills a bitmask.
    """

    is_mask = False
    reads_tokens = True
    warm_up_params = SamplingParams(top_k=1)

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.steps: dict[int, int] = {}
        self.states: dict[int, tuple[int, int]] = {}  # position, last accepted token

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        self.steps[slot] = params.top_k
        self.states.pop(slot, None)
        return params.top_k > 0

    def prepare(self, batch):
        bitmask = np.zeros((len(batch.rows), -(-self.vocab_size // 32)), dtype=np.uint32)
        for i, (slot, first, position) in enumerate(zip(batch.slots, batch.first_positions, batch.positions)):
            assert self.states.get(slot, (0, 0))[0] <= first, "a draft was taken for an accepted token"
            if position == first:
                self.states[slot] = first, int(batch.token_ids[slot, first - 1])
            last = int(batch.token_ids[slot, position - 1])
            allowed = (last + self.steps[slot]) % self.vocab_size
            bitmask[i, allowed // 32] |= np.uint32(1 << allowed % 32)
        return AllowedTokens(torch.from_numpy(batch.rows), torch.from_numpy(bitmask.view(np.int32)))


@dataclasses.dataclass
class AllowedTokens:
    rows: torch.Tensor
    bitmask: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        bits = self.bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
        allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
        logits.index_copy_(0, self.rows, logits[self.rows].masked_fill(~allowed, float("-inf")))


def test_a_new_rule_needs_no_more_than_its_class():
    """Beside a row of another rule, with drafts; none, one and both of them are accepted."""
    table = new_table(3, V, rules=[*RULES, Grammar])
    table.set_row(2, SamplingParams(top_k=7), 0, [], 1)
    table.set_row(0, SamplingParams(temperature=0.0, logit_bias={9: 100.0}), 0, [], 1)
    tokens = np.zeros((3, 40), dtype=np.int32)
    position, accepted = 3, [0, 1, 2, 0, 2]
    tokens[2, :3] = [1, 8, 15]
    for count in accepted:
        right = [int(tokens[2, position - 1] + 7 * i) % V for i in (1, 2, 3)]
        tokens[2, position : position + 2] = [*right[:count], 50, 50][:2]
        positions = [position, position + 1, position + 2]
        metadata = table.select([0, 2, 2, 2], [5, *positions], tokens)
        got = Sampler()(random_logits(4), metadata).token_ids.tolist()
        assert got[0] == 9
        assert got[1 : 2 + count] == right[: 1 + count]
        tokens[2, position + count] = got[1 + count]
        position += count + 1


def test_a_new_rule_is_told_when_tokens_are_missing():
    table = new_table(1, V, rules=[Grammar])
    table.set_row(0, SamplingParams(top_k=1), 0, [], 1)
    with pytest.raises(ValueError, match="token_ids is None, but Grammar reads the tokens of its rows"):
        table.select([0], [3])


def test_bias_is_added_before_penalties():
    logits = torch.full((1, V), -1.0)
    row = make_row(SamplingParams(logit_bias={3: 5.0}, repetition_penalty=2.0), prompt=[3])
    assert edited(logits, [row])[0, 3] == 2.0  # (-1 + 5) / 2, not -1 * 2 + 5


def test_repetition_penalty_covers_prompt_and_output_others_output_only():
    logits = torch.full((1, V), 2.0)
    row = make_row(
        SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5), [1, 1, 2], [2, 2, 3]
    )
    after = edited(logits, [row])[0]
    assert after[:5].tolist() == [2.0, 1.0, 1.0 - 0.5 - 0.5, 1.0 - 0.25 - 0.5, 2.0]


def test_presence_penalty_alone_leaves_prompt_tokens():
    after = edited(torch.zeros(1, V), [make_row(SamplingParams(presence_penalty=1.0), [1, 2], [3])])[0]
    assert after[:4].tolist() == [0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_eos_and_stop_ids_until_reached(ignore_eos):
    params = SamplingParams(min_tokens=2, stop_token_ids=[9], ignore_eos=ignore_eos)
    for num_output, expected in ((0, [0, 7, 9]), (1, [0, 7, 9]), (2, []), (3, [])):
        row = make_row(params, [1, 2, 3], [5] * num_output, eos=(0, 7))
        assert masked(edited(torch.zeros(1, V), [row])[0]) == expected


def test_eos_and_stop_ids_outside_the_logits_are_ignored():
    """A tokenizer may know more ids than the checkpoint has logits."""
    row = make_row(SamplingParams(min_tokens=2, stop_token_ids=[V, -1]), [1], eos=(V + 4, 2))
    assert masked(edited(torch.zeros(2, V), [row, row])) == [[0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("words", "output", "banned"),
    [
        ([[5]], [], [5]),
        ([[5]], [1, 2], [5]),
        ([[1, 2]], [], []),
        ([[1, 2]], [1], [2]),
        ([[1, 2]], [1, 3], []),
        ([[1, 2, 3]], [2], []),
        ([[1, 2, 3]], [1, 2], [3]),
        ([[1, 2, 3]], [4, 2], []),
        ([[1, 2, 3], [2, 4], [6], []], [9, 1, 2], [3, 4, 6]),
        ([[0, 0, 1], [0, 2], [0, 0, 0, 3]], [0, 0], [1, 2]),
        ([[V - 1, V - 1]], [V - 1], [V - 1]),
    ],
)
def test_bad_words(words, output, banned):
    """The prompt would complete heads that the output only ends."""
    row = make_row(SamplingParams(bad_words_ids=words), [1, 2, 0, 1], output)
    plain = make_row(SamplingParams(temperature=0.0), [1], [1])
    assert masked(edited(torch.zeros(2, V), [plain, row])) == [[1, token] for token in banned]


def test_bad_words_match_the_output_only():
    row = make_row(SamplingParams(bad_words_ids=[[1, 2]]), prompt=[1], output=[])
    assert torch.isfinite(edited(torch.zeros(1, V), [row])).all()


def test_bad_words_of_many_requests_in_few_slots(reference):
    """Storage is compacted and grows while other slots keep their words."""
    rng = np.random.default_rng(0)
    table = new_table(4, V)
    tokens = rng.integers(0, 4, (4, 30)).astype(np.int32)
    rows: dict[int, SampleRow] = {}
    for _ in range(200):
        slot = int(rng.integers(4))
        words = [rng.integers(0, 4, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 40))]
        params = SamplingParams(temperature=0.0, bad_words_ids=words)
        table.set_row(slot, params, 0, [], 2)
        rows[slot] = SampleRow(params, 0, 30, tokens[slot, :2], tokens[slot, 2:])
        slots = sorted(rows)
        after = edit_logits(torch.zeros(len(slots), V), table.select(slots, [30] * len(slots), tokens)).numpy()
        for row, got in zip((rows[s] for s in slots), after):
            assert got.tolist() == reference.edited(np.zeros(V), row).tolist()


def test_no_python_runs_per_row_or_per_word():
    """`select` executes as many lines for 8 rows of 500 words, biases, allowed and stop ids as for one row of 2."""

    def lines(num_rows: int, count: int) -> int:
        params = SamplingParams(
            temperature=0.0,
            allowed_token_ids=list(range(count)),
            logit_bias=dict.fromkeys(range(count), 1.0),
            bad_words_ids=[[3]] + [[1, 2, t] for t in range(count)],
            min_tokens=9,
            stop_token_ids=list(range(count)),
        )
        table = new_table(num_rows, 1000)
        for slot in range(num_rows):
            table.set_row(slot, params, 0, [], 1)
        tokens = np.tile(np.array([0, 0, 1, 2], dtype=np.int32), (num_rows, 1))
        executed = 0

        def trace(frame, event, arg):
            nonlocal executed
            executed += "inflight" in frame.f_code.co_filename and event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            metadata = table.select(range(num_rows), [4] * num_rows, tokens)
        finally:
            sys.settrace(before)
        assert len(metadata.edits) == 4
        assert len(metadata.edits[3].index) == num_rows * (count + 1)
        return executed

    assert lines(8, 500) == lines(1, 2) > 40


def test_extreme_biases_stay_finite_or_ban():
    row = make_row(SamplingParams(logit_bias={0: float("inf"), 1: 1e300, 2: -1e300, 3: float("-inf"), 4: float("nan")}))
    after = edited(torch.ones(1, V), [row])[0]
    assert torch.isfinite(after[:2]).all()
    assert (after[:2] > 1e29).all()
    assert after[2:4].tolist() == [-float("inf")] * 2
    assert after[4] == 1.0


def test_edits_leave_the_callers_logits():
    logits = random_logits(1)
    before = logits.clone()
    edited(logits, [make_row(SamplingParams(logit_bias={1: 3.0}))])
    assert torch.equal(logits, before)


def counted(ids: np.ndarray, counts: np.ndarray) -> dict[int, float]:
    assert len(set(ids.tolist())) == len(ids) == len(counts)
    return dict(zip(ids.tolist(), counts.tolist()))


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.integers(0, 200), max_size=150),
    st.lists(st.integers(0, 150), max_size=6),
    st.lists(st.integers(0, 220), max_size=8),
    st.booleans(),
)
def test_token_counts_grown_in_steps_equal_a_count_from_scratch(prompt, output, stops, drafts, with_prompt):
    tokens = np.array(prompt + output, dtype=np.int32)
    counts = TokenCounts(tokens[: len(prompt)], with_prompt=with_prompt)

    def expected(text: list[int]) -> dict[int, int]:
        return (dict.fromkeys(prompt, 0) if with_prompt else {}) | {t: text.count(t) for t in text}

    for stop in [*sorted(min(s, len(output)) for s in stops), len(output)]:
        counts.update(tokens, len(prompt) + stop)
        assert counted(*counts.with_drafts(np.array(drafts, dtype=np.int32))) == expected(output[:stop] + drafts)
        assert counted(counts.ids[: counts.size], counts.counts[: counts.size]) == expected(output[:stop])


def test_token_counts_hold_any_number_of_distinct_tokens():
    tokens = np.arange(1000, dtype=np.int32)
    counts = TokenCounts(tokens[:3], with_prompt=True)
    for position in range(3, 1001):
        counts.update(tokens, position)
    assert counts.ids[: counts.size].tolist() == list(range(1000))
    assert counts.counts[: counts.size].tolist() == [0.0] * 3 + [1.0] * 997


def test_a_slot_filled_again_forgets_its_counts():
    table = new_table(2, V)
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    tokens = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    table.set_row(1, params, 0, [], 1)
    table.select([1], [3], tokens)
    table.set_row(1, params, 0, [], 2)
    tokens[1] = [7, 8, 9]
    after = edit_logits(torch.zeros(1, V), table.select([1], [3], tokens))[0]
    assert after.nonzero().flatten().tolist() == [9]


def test_only_allowed_tokens_keep_their_logits():
    rows = [make_row(SamplingParams(allowed_token_ids=[5, 2, 5], logit_bias={7: 99.0})), make_row(SamplingParams())]
    logits = random_logits(2)
    after = edited(logits, rows)
    assert masked(after[0]) == [token for token in range(V) if token not in (2, 5)]
    assert after[0, [2, 5]].tolist() == logits[0, [2, 5]].tolist()
    assert torch.equal(after[1], logits[1])
