"""Engines on an emulated card that replay captured decode steps, against eager ones.

`tests/backend/emulated/test_engine_on_a_card.py` compares whole engines, whatever arrives.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from card_rig import card, card_core, functions_as_kernels, num_replays
from checkpoints import greedy_reference, make_checkpoint
from emulated_card import Card
from every_kind import every_kind, prompt_of, work_of
from longrope import longrope_is_capturable
from nightly import nightly_but
from offline import make_core, run, tokens

from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import UNUSABLE_LOGITS

from .test_drafts import Replayer
from .test_parity import prepared

__all__ = ["card"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("graphs"))


def cpu_core(checkpoint: str) -> EngineCore:
    """An engine without any graphs, whose answers those of all others must be."""
    return make_core(checkpoint, max_model_len=64, seed=1)


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str) -> EngineCore:
    return cpu_core(checkpoint)


@pytest.fixture(autouse=True)
def kernels(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


def graph_core(path: str, **options: Any) -> EngineCore:
    """With more tokens a step than its graphs for decodes and drafts have."""
    return card_core(path, **{"max_num_batched_tokens": 64, **options})


def replays_by_rows(core: EngineCore) -> dict[int, int]:
    """Rows of a bucket for decodes -> how often its graph was replayed."""
    return {size.rows: count for size, count in num_replays(core).items() if size.query_len == 1}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("launch_ahead", nightly_but([True], [False, True]))
def test_every_bucket_gives_the_tokens_of_generate(checkpoint: str, launch_ahead: bool) -> None:
    core = graph_core(checkpoint, max_num_seqs=9, max_num_batched_tokens=128, async_scheduling=launch_ahead)
    prompts = [prompt_of(index, 3 + 2 * index) for index in range(9)]
    expected = greedy_reference(checkpoint, prompts, [12] * 9)
    for rows in (1, 2, 3, 4, 5, 8, 9):
        before = replays_by_rows(core)
        deltas = run(core, prompts[:rows], [GREEDY] * rows)
        assert [tokens(deltas[index, 0]) for index in range(rows)] == expected[:rows]
        replays = {bucket: count - before[bucket] for bucket, count in replays_by_rows(core).items()}
        bucket = min(size for size in (1, 2, 4, 8, 9) if size >= rows)
        assert replays.pop(bucket) >= 11
        assert not any(replays.values())


@pytest.mark.nightly  # test_mixed_graphs.py has windows and softcap
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe", "llama4_text", "gpt2", "jetmoe"])
def test_architectures_give_the_tokens_of_generate(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    """Windows and softcap, experts, learned positions; and a model whose experts ask the host for their tokens."""
    path, prompts, counts, expected = prepared(model_type)
    core = graph_core(path, block_size=5, max_num_batched_tokens=40, max_num_seqs=4, max_model_len=160)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[index, 0]) for index in range(len(prompts))] == expected
    if model_type == "jetmoe":
        (warning,) = warnings_of(caplog)
        assert "a step cannot be captured (RuntimeError: called a synchronizing CUDA operation" in warning
    else:
        assert sum(replays_by_rows(core).values()) >= 10


@pytest.mark.parametrize("kind", nightly_but(["longrope"], ["longrope", "dynamic"]))
def test_rotary_embeddings_of_each_length(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two choices are both in a graph, which takes each token's own; one for each length cannot be captured.

    Nor can transformers' choice of two where it reads positions on the host.
    """
    rope: dict[str, Any] = dict(rope_type=kind, rope_theta=100.0, original_max_position_embeddings=32)
    if kind == "longrope":
        rope |= dict(long_factor=[1.0, 3.0, 9.0, 16.0], short_factor=[1.0, 1.1, 1.3, 1.6])
    else:
        rope |= dict(factor=4.0)
    positions = 32 if kind == "dynamic" else 256
    path = make_checkpoint("llama", tmp_path, rope_parameters=rope, max_position_embeddings=positions)
    core, eager = pair_of(path, max_model_len=96, max_num_seqs=4)
    prompts = [prompt_of(index, length) for index, length in enumerate((5, 40, 20))]
    params = [every_kind(0, max_tokens=count) for count in (12, 12, 20)]
    assert work_of(core, prompts, params, 0) == work_of(eager, prompts, params, 0)
    captured = bool(core.runner.graphs)
    assert captured == (kind == "longrope" and longrope_is_capturable())
    assert captured != any("without CUDA graphs" in text for text in warnings_of(caplog))


def num_replays_with_drafts(core: EngineCore) -> dict[int, int]:
    """Tokens of a bucket for drafts -> how often its graph was replayed."""
    return {size.tokens: count for size, count in num_replays(core).items() if size.query_len > 1}


def drafting(longest: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": longest}}


SQUEEZED = dict(num_gpu_blocks_override=24, block_size=4, max_num_seqs=4)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(1, id="all wrong", marks=pytest.mark.nightly),
        pytest.param(3, id="some wrong"),
        pytest.param(99, id="all right", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(max_num_seqs=4), id="plain", marks=pytest.mark.nightly),
        pytest.param(dict(SQUEEZED), id="preempted", marks=pytest.mark.nightly),
        pytest.param(dict(SQUEEZED, swap_space="1MiB", preemption_mode="swap"), id="swapped"),
        pytest.param(
            dict(max_num_seqs=3, max_num_batched_tokens=12, block_size=1),
            id="few tokens a step",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_steps_with_drafts_are_replayed(
    checkpoint: str, on_the_cpu: EngineCore, options: dict[str, Any], wrong: int
) -> None:
    core = graph_core(checkpoint, **{"max_model_len": 64, **options}, **drafting(5))
    prompts = [prompt_of(index, 4 + 3 * index) for index in range(8)]
    params = [every_kind(index, max_tokens=20) for index in range(8)]
    expected = {key: tokens(deltas) for key, deltas in run(on_the_cpu, prompts, params).items()}
    core.scheduler.policies.drafter = Replayer(expected, wrong)
    assert {key: tokens(deltas) for key, deltas in run(core, prompts, params).items()} == expected
    replays = num_replays_with_drafts(core)
    assert sum(map(bool, replays.values())) >= 2, "more than one bucket"
    assert work_of(core, prompts, params, stagger=2) == work_of(on_the_cpu, prompts, params, stagger=2)


def test_drafts_without_buckets_of_their_own_are_computed_eagerly(checkpoint: str) -> None:
    """As drafts that a grammar forces are where nothing speculates; steps between them are replayed."""
    core = graph_core(checkpoint, max_num_seqs=4)
    prompts = [prompt_of(index, 4 + index) for index in range(4)]
    params = [every_kind(index, max_tokens=20) for index in range(4)]
    expected = {key: tokens(deltas) for key, deltas in run(core, prompts, params).items()}
    before = sum(replays_by_rows(core).values())
    core.scheduler.policies.drafter = Replayer(expected, 3)
    assert {key: tokens(deltas) for key, deltas in run(core, prompts, params).items()} == expected
    assert not num_replays_with_drafts(core)
    assert sum(replays_by_rows(core).values()) > before


def test_a_draft_that_is_longer_than_its_bucket_allows_is_computed_eagerly(checkpoint: str) -> None:
    core = graph_core(checkpoint, max_num_seqs=4, **drafting(3))
    prompt, params = [prompt_of(0, 8)], [every_kind(0, max_tokens=30)]
    expected = {key: tokens(deltas) for key, deltas in run(core, prompt, params).items()}
    core.scheduler.policies.drafter = Replayer(expected, 99, length=4)
    assert {key: tokens(deltas) for key, deltas in run(core, prompt, params).items()} == expected
    assert sum(num_replays_with_drafts(core).values()) == 1, "the last one, which max_tokens cuts"


def pair_of(path: str, **options: Any) -> tuple[EngineCore, EngineCore]:
    """Two engines; the second captures nothing."""
    return tuple(graph_core(path, enforce_eager=eager, **options) for eager in (False, True))  # type: ignore[return-value]


def contents(core: EngineCore) -> dict[str, torch.Tensor]:
    """The pool, and what the device keeps by slot but for the void slot."""
    state = core.runner.device_state
    kept = {"token_ids": state.token_ids[:-1].clone(), "block_table": state.block_table[:-1].clone()}
    for index, layer in enumerate(core.runner.model.model.layers):
        cache = layer.self_attn.inflight.cache
        kept |= {f"key {index}": cache.key.clone(), f"value {index}": cache.value.clone()}
    return kept


def assert_same_bytes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


MOVED = [
    *(f"inputs.{name}" for name in ("input_ids", "positions", "slot_mapping", "block_table")),
    *(f"inputs.{name}" for name in ("logits_indices", "sample_indices")),
    *(f"state.{name}" for name in ("token_ids", "block_table")),
    "cache.key",
    "embed.weight",
]


@pytest.mark.parametrize("place", nightly_but(["inputs.input_ids", "state.token_ids", "cache.key"], MOVED))
def test_a_replay_with_a_moved_tensor_fails(checkpoint: str, place: str) -> None:
    owner, name = place.split(".")
    core = graph_core(checkpoint, max_num_seqs=2)
    runner, decoder = core.runner, core.runner.model.model
    run(core, [[1, 2, 3]], [GREEDY])
    owners = dict(
        inputs=runner.inputs,
        state=runner.device_state,
        cache=decoder.layers[1].self_attn.inflight.cache,
        embed=decoder.embed_tokens,
    )
    moved = getattr(owners[owner], name).clone()
    setattr(owners[owner], name, torch.nn.Parameter(moved, requires_grad=False) if owner == "embed" else moved)
    with pytest.raises(RuntimeError, match="freed after its capture"):
        run(core, [[1, 2, 3]], [GREEDY])


def test_a_step_whose_own_tensors_moved_has_no_graph(checkpoint: str) -> None:
    core = graph_core(checkpoint, max_num_seqs=2)
    core.runner._upload = core.runner._upload.clone()
    deltas = run(core, [[1, 2, 3]], [GREEDY])
    assert tokens(deltas[0, 0]) == greedy_reference(checkpoint, [[1, 2, 3]], [12])[0]
    assert not any(replays_by_rows(core).values())


def test_enforce_eager_captures_nothing(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    core = graph_core(checkpoint, enforce_eager=True)
    deltas = run(core, [[1, 2, 3]], [GREEDY])
    assert tokens(deltas[0, 0]) == greedy_reference(checkpoint, [[1, 2, 3]], [12])[0]
    assert core.runner.graphs._capturer is None
    assert core.info.graph_bytes == 0
    assert warnings_of(caplog) == []


def test_a_row_that_gains_two_blocks_is_not_replayed(checkpoint: str) -> None:
    """After a failed step the next one brings the blocks of both: more than its graph has room for."""
    core = graph_core(checkpoint, max_num_seqs=2, block_size=1, max_model_len=64)
    core.runner.rows.sent = lambda rows: None  # every step brings all blocks
    deltas = run(core, [[1, 2, 3]], [GREEDY])
    assert tokens(deltas[0, 0]) == greedy_reference(checkpoint, [[1, 2, 3]], [12])[0]
    assert not any(replays_by_rows(core).values())


def test_a_row_whose_logits_are_not_finite_fails_by_name(checkpoint: str) -> None:
    """The graph marks it, as an eager step does."""
    core = graph_core(checkpoint, max_num_seqs=2, async_scheduling=False)
    assert core.add_request(AddRequest(0, [1, 2, 3], GREEDY)) is None
    for _ in range(3):
        assert core.step().failed == []
    before = sum(replays_by_rows(core).values())
    with torch.no_grad():
        core.runner.model.lm_head.weight.fill_(float("nan"))
    assert core.step().failed == [RequestFailed(0, "INTERNAL", UNUSABLE_LOGITS)]
    assert sum(replays_by_rows(core).values()) == before + 1 > 1
