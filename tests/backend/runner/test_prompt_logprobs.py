"""Prompt log probabilities: chunks bound the logits, and change no entry."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from nightly import ARCHITECTURES_IN_SHORT, nightly_but
from offline import make_core, make_device_core, run, tokens
from torch import Tensor, nn

from inflight.engine.deltas import SequenceDelta
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.forward.forward_pass import ModulePass

MAX_ROWS = 7


def entries_of(deltas: dict[tuple[int, int], list[SequenceDelta]]) -> list[list[Any]]:
    return [[entry for delta in of_one for entry in delta.prompt_logprobs or ()] for of_one in deltas.values()]


@pytest.mark.parametrize(
    "model_type",
    nightly_but([*ARCHITECTURES_IN_SHORT, "cohere", "modernbert-decoder"], [*ARCHITECTURES, "modernbert-decoder"]),
)
def test_chunks_of_logits_change_no_entry(model_type: str, tmp_path: Path, sizes: list[int]) -> None:
    """Requests with and without them in one batch, in chunks of the prompt, with as many top entries as they ask."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (40, 3, 25, 1)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=top) for top in (2, None, 0, 5)
    ]
    path = make_checkpoint(model_type, tmp_path)
    whole = make_core(path, native_forward=False, max_num_batched_tokens=48)
    expected = run(whole, prompts, params)
    assert max(sizes) > MAX_ROWS
    sizes.clear()
    core = make_core(path, native_forward=False, max_num_batched_tokens=48)
    core.runner.forward.max_rows = MAX_ROWS
    deltas = run(core, prompts, params)
    assert max(sizes) == MAX_ROWS, "no call of the head has more rows"
    assert [list(map(len, entries)) for entries in entries_of(deltas)] == [[0, *[3] * 39], [], [0, *[1] * 24], [0]]
    for entries, wanted in zip(entries_of(deltas), entries_of(expected)):
        for entry, right in zip(entries, wanted):
            assert [(token, rank) for token, _, rank in entry] == [(token, rank) for token, _, rank in right]
            assert [p for _, p, _ in entry] == pytest.approx([p for _, p, _ in right], abs=1e-5)
    assert [tokens(of_one) for of_one in deltas.values()] == [tokens(of_one) for of_one in expected.values()]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the head in a step."""
    seen: list[int] = []
    logits = ModulePass._logits

    def counted(self: ModulePass, inputs: dict[str, Tensor], keep: Tensor) -> Tensor:
        seen.append(len(keep))
        result = logits(self, inputs, keep)
        assert len(result) == len(keep)
        return result

    monkeypatch.setattr(ModulePass, "_logits", counted)
    return seen


def test_without_prompt_logprobs_the_model_is_called_once_a_step(tmp_path: Path, sizes: list[int]) -> None:
    core = make_core(make_checkpoint("llama", tmp_path), native_forward=False)
    run(core, [[1, 2, 3]], [SamplingParams(max_tokens=4, ignore_eos=True)])
    assert sizes == [1] * 4


@pytest.mark.parametrize("native", [True, False])
def test_chunks_have_as_many_rows_as_a_step_samples_anyway(tmp_path: Path, native: bool) -> None:
    path = make_checkpoint("llama", tmp_path)
    for max_num_seqs, most in ((1024, 1024), (1, 256)):
        core = make_core(path, native_forward=native, max_num_seqs=max_num_seqs, max_num_batched_tokens=1024)
        assert core.runner.forward.max_rows == most


class _Detour(nn.Module):
    """A model that does not call what it names as its decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Identity()

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Any:
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 50)[:, logits_to_keep])


def test_a_model_that_goes_round_its_decoder_computes_all_logits_at_once() -> None:
    forward = ModulePass(_Detour())
    forward.max_rows = 3
    ids = torch.arange(10)[None]
    for _ in range(2):
        logits, chunks, _ = forward.run(
            ids, ids, torch.tensor([9]), torch.arange(2, 10), torch.tensor([], dtype=torch.int64)
        )
        assert logits.argmax(-1).tolist() == [9]
        assert [chunk.argmax(-1).tolist() for chunk in chunks] == [[2, 3, 4], [5, 6, 7], [8, 9]]


@pytest.mark.parametrize("options", [dict(), dict(enable_prefix_caching=False), dict(async_scheduling=True)], ids=repr)
@pytest.mark.parametrize("native", [True, False])
def test_a_prompt_of_several_sequences_is_computed_and_delivered_once(
    tmp_path: Path, native: bool, options: dict[str, Any]
) -> None:
    path = make_checkpoint("llama", tmp_path)
    prompt = [random.Random(2).randrange(VOCAB) for _ in range(37)]

    def params(n: int) -> list[SamplingParams]:
        return [SamplingParams(n=n, seed=3, max_tokens=4, ignore_eos=True, prompt_logprobs=2)]

    options = {"native_forward": native, "block_size": 4, "max_num_batched_tokens": 16, **options}
    alone = run(make_core(path, **options), [prompt], params(1))
    core = make_core(path, **options)
    computed = []
    launch = core.runner.launch
    core.runner.launch = lambda out: (computed.append(out.num_prompt_tokens), launch(out))[1]
    several = run(core, [prompt], params(5))
    entries, *others = entries_of(several)
    assert entries == entries_of(alone)[0], "in float32, to the last bit"
    assert len(entries) == len(prompt)
    assert others == [[]] * 4
    assert sum(computed) == len(prompt) + 4 * (len(prompt) % 4), "the others compute what no full block holds"
    assert [len(tokens(deltas)) for deltas in several.values()] == [4] * 5


def test_a_preempted_leader_delivers_each_entry_once(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    core = make_core(path, block_size=4, num_gpu_blocks_override=16, max_model_len=64)
    prompts = [[7, 3, 9] * 8, [1, 2, 4] * 8]
    params = [SamplingParams(n=2, seed=3, max_tokens=24, ignore_eos=True, prompt_logprobs=0)] * 2
    deltas = run(core, prompts, params)
    assert core.scheduler.num_preempted_total > 0
    assert dict(zip(deltas, map(len, entries_of(deltas)))) == {(0, 0): 24, (0, 1): 0, (1, 0): 24, (1, 1): 0}


def test_of_sequences_that_had_begun_the_first_that_runs_delivers_them(tmp_path: Path) -> None:
    core = make_core(make_checkpoint("llama", tmp_path))
    params = SamplingParams(n=3, seed=3, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    assert core.add_request(AddRequest(1, [5, 6, 7], params, output_token_ids=[None, [9], [8]])) is None
    seen = [delta for _ in range(9) for delta in core.step().deltas if delta.prompt_logprobs]
    assert [(delta.index, len(delta.prompt_logprobs or ())) for delta in seen] == [(1, 3)]


def test_a_prompt_of_one_token_has_one_empty_entry(tmp_path: Path) -> None:
    """Though no position predicts a token of it, with either runner."""
    path = make_checkpoint("llama", tmp_path)
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)]
    for core in (make_core(path), make_device_core(path)):
        assert entries_of(run(core, [[7]], params)) == [[[]]]
