"""Log probabilities of a long prompt come in pieces, so that the frontend handles each delta quickly."""

from __future__ import annotations

import pytest
from engine_rig import Info, add, make_core

from inflight.engine import delta_logprobs as logprobs
from inflight.engine.deltas import SequenceDelta, StepStats
from inflight.engine.logprobs import Logprobs, TokenLogprobs
from inflight.engine.messages import StepMessage, decode_to_frontend, encode
from inflight.engine.step import StepOutput


def entry(token: int, count: int) -> TokenLogprobs:
    return [(token, -0.5, 1 + k) for k in range(count)]


@pytest.mark.parametrize(("counts", "sizes"), [([4] * 9, [3, 3, 3, 1]), ([30] * 3, [1, 1, 1, 1]), ([1] * 3, [4])])
def test_the_last_piece_comes_with_the_token(
    counts: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_MAX_TRIPLES", 12)
    core = make_core(Info())
    prompt = list(range(1, len(counts) + 2))
    add(core, 1, [5, 6], max_tokens=1, ignore_eos=True)
    add(core, 2, prompt, max_tokens=1, ignore_eos=True, prompt_logprobs=max(counts) - 1)
    out = core.scheduler.schedule()
    row = len(out.slots) - 1
    entries = [entry(token, count) for token, count in zip(prompt[1:], counts)]
    deltas, columns = core.scheduler.update(out, StepOutput([7, 8], prompt_logprobs={row: Logprobs.of(entries)}))
    assert not columns.token_ids
    mine = [delta for delta in deltas if delta.request_id == 2]
    assert [len(delta.prompt_logprobs) for delta in mine] == sizes
    assert [found for delta in mine for found in delta.prompt_logprobs] == [[], *entries]
    assert [delta.token_ids for delta in mine] == [[]] * (len(sizes) - 1) + [[8]]
    assert [delta.finish_reason for delta in mine] == [None] * (len(sizes) - 1) + ["length"], "nothing comes after it"
    assert len(deltas) == len(mine) + 1


def test_they_cross_the_pipe_unchanged() -> None:
    delta = SequenceDelta(
        1, 0, [7], logprobs=Logprobs.of([entry(7, 3)]), prompt_logprobs=Logprobs.of([[], entry(5, 2)])
    )
    message = StepMessage([delta], StepStats(*[1] * 10, step_seconds=0.5))
    assert decode_to_frontend(encode(message)).full_deltas == [delta]
