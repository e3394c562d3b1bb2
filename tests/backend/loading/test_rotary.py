"""Rotary embeddings that depend on a sequence's length: each request makes its own choice, that of `generate()`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from card_rig import card_core, functions_as_kernels, num_replays
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from emulated_card import emulated_card
from engine_rig import Info
from longrope import longrope_is_capturable
from nightly import nightly_but
from offline import make_core, make_device_core, run, tokens

from inflight.config import ConfigError, EngineConfig
from inflight.engine.attached import Attached
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import AddRequest
from inflight.engine.pooling import Pooling
from inflight.engine.request_factory import make_sequences
from inflight.engine.rope_scaling import RopeChoice
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.forward import rotary
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load

LIMIT = 32
LONGROPE = dict(
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=100.0,
        long_factor=[1.0, 3.0, 9.0, 16.0],
        short_factor=[1.0, 1.1, 1.3, 1.6],
        original_max_position_embeddings=LIMIT,
    ),
    original_max_position_embeddings=LIMIT,
)
PHIMOE = dict(rope_parameters=dict(LONGROPE["rope_parameters"], short_mscale=1.1, long_mscale=1.3), sliding_window=None)
MODELS: dict[str, dict[str, Any]] = {
    "phi3": LONGROPE,
    "phimoe": PHIMOE,
    "llama": dict(rope_parameters=LONGROPE["rope_parameters"]),
}

# (prompt, output tokens): short, at the limit, beyond it by the prompt; each with one choice for the whole answer.
SHAPES = [(5, 20), (60, 20), (20, 13), (33, 12), (3, 8), (40, 30), (31, 2)]


@pytest.fixture(params=MODELS)
def path(request, tmp_path: Path) -> str:
    return make_checkpoint(request.param, tmp_path, **MODELS[request.param])


def prompts_of(shapes: list[tuple[int, int]]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length, _ in shapes]


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


SETTINGS: dict[str, dict[str, Any]] = {
    "one step": {},
    "small chunks": dict(block_size=5, max_num_batched_tokens=13, max_num_seqs=3, async_scheduling=True),
    "preempting": dict(block_size=4, max_num_batched_tokens=64, num_gpu_blocks_override=36, max_model_len=96),
}


@pytest.mark.parametrize("setting", nightly_but(["small chunks"], SETTINGS))
def test_every_request_makes_the_choice_of_generate(path: str, setting: str) -> None:
    prompts, counts = prompts_of(SHAPES), [count for _, count in SHAPES]
    core = make_core(path, **SETTINGS[setting])
    deltas = run(core, prompts, [greedy(count) for count in counts], stagger=2)
    assert [tokens(deltas[index, 0]) for index in range(len(prompts))] == greedy_reference(
        path, prompts, counts, alone=True
    )
    if setting == "preempting":
        assert core.scheduler.num_preempted_total > 0


def test_steps_on_a_device_and_replayed_ones_make_the_same_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    prompts, counts = prompts_of(SHAPES), [count for _, count in SHAPES]
    expected = greedy_reference(path, prompts, counts, alone=True)

    def outputs(core: Any) -> list[list[int]]:
        deltas = run(core, prompts, [greedy(count) for count in counts], stagger=2)
        return [tokens(deltas[index, 0]) for index in range(len(prompts))]

    assert outputs(make_device_core(path, block_size=5, max_num_batched_tokens=40, max_num_seqs=4)) == expected
    functions_as_kernels(monkeypatch)
    with emulated_card():
        core = card_core(path, max_model_len=None)
        assert outputs(core) == expected
        replays = sum(num_replays(core).values())
    assert replays > 20 if longrope_is_capturable() else replays == 0


def test_a_request_that_crosses_the_limit_is_long_from_its_first_token(tmp_path: Path) -> None:
    """Its answer is that of a prompt so long that `generate()` is never short."""
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    (prompt,) = prompts_of([(20, 0)])
    whole = tokens(run(make_core(path), [prompt], [greedy(40)])[0, 0])
    assert whole[:14] != greedy_reference(path, [prompt], [14])[0][:14]
    later = greedy_reference(path, [prompt + whole[:13]], [27])[0]
    assert whole[13:] == later


def test_a_prefix_is_shared_only_within_a_choice(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    (prompt,) = prompts_of([(24, 0)])
    core = make_core(path, block_size=4)
    short, long = greedy(8), greedy(40)
    first = tokens(run(core, [prompt], [short])[0, 0])
    for params, cached, expected in [(long, 0, None), (short, 20, first), (long, 20, None)]:
        deltas = run(core, [prompt], [params])[0, 0]
        assert next(delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None) == cached
        assert tokens(deltas) == (expected or tokens(run(make_core(path), [prompt], [params])[0, 0]))


def test_sequences_of_one_request_and_resumed_ones_keep_the_choice(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    (prompt,) = prompts_of([(24, 0)])
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=30, ignore_eos=True)
    deltas = run(make_core(path), [prompt], [params])
    outputs = [tokens(deltas[0, index]) for index in range(3)]
    assert len({tuple(output) for output in outputs}) == 3
    core = make_core(path)
    short = AddRequest(1, prompt[:3], greedy(9))
    assert core.add_request(AddRequest(0, prompt, params, output_token_ids=[output[:10] for output in outputs])) is None
    assert core.add_request(short) is None
    found: dict[tuple[int, int], list[int]] = {}
    while core.has_work:
        for delta in core.step().deltas:
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert [found[0, index] for index in range(3)] == [output[10:] for output in outputs]
    assert found[1, 0] == greedy_reference(path, [prompt[:3]], [9])[0]


def test_dynamic_scaling_takes_the_base_of_the_request(tmp_path: Path) -> None:
    rope = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)
    path = make_checkpoint("llama", tmp_path, rope_parameters=rope, max_position_embeddings=LIMIT)
    # Beyond the limit `generate()` has a base for each token, and remembers the longest: in order of length.
    shapes = [(5, 20), (20, 13), (33, 1), (60, 1), (90, 1)]
    prompts, counts = prompts_of(shapes), [count for _, count in shapes]
    core = make_core(path, max_model_len=100, block_size=4, max_num_batched_tokens=24)
    deltas = run(core, prompts, [greedy(count) for count in counts])
    assert [tokens(deltas[index, 0]) for index in range(len(prompts))] == greedy_reference(
        path, prompts, counts, alone=True
    )
    with pytest.raises(ConfigError, match="max_model_len=129 exceeds the checkpoint's 128 positions"):
        make_core(path, max_model_len=129)
    assert make_core(path).info.max_model_len == LIMIT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_within_the_limit_nothing_is_replaced(tmp_path: Path, dtype: str) -> None:
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    values = dict(model=path, device="cpu", dtype=dtype, kv_cache_memory="8MiB")
    loaded = load(EngineConfig.from_dict({**values, "max_model_len": LIMIT}))
    assert (loaded.hooks, loaded.info.choices) == ([], [])
    assert not isinstance(loaded.model, torch.nn.Module), "such a model is a native decoder"
    assert load(EngineConfig.from_dict({**values, "max_model_len": LIMIT + 2})).info.choices == [
        RopeChoice(LIMIT, False, LIMIT + 2)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_looks_across_requests_is_refused_with_the_length_up_to_which_it_can_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    monkeypatch.setattr(rotary, "kinds_of", lambda module: {})  # as if its code were its own
    values = dict(model=path, device="cpu", dtype=dtype, kv_cache_memory="8MiB")
    with pytest.raises(LoadError, match=f"set max_model_len to at most {LIMIT}"):
        load(EngineConfig.from_dict(values))
    load(EngineConfig.from_dict({**values, "max_model_len": LIMIT}))


def test_layers_with_different_limits_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path, **LONGROPE)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    other = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb
    other.config.rope_parameters["original_max_position_embeddings"] = 2 * LIMIT
    model.model.other = other
    with pytest.raises(ConfigError, match=rf"beyond 32, 64 tokens.*set max_model_len to at most {LIMIT}"):
        rotary.attach_request_rotary(model, 256, 4, 64, torch.device("cpu"))


class TestRopeChoice:
    def test_lengths(self) -> None:
        choice = RopeChoice(32, False, 100)
        lengths = [choice.length(prompt, count) for prompt, count in [(1, 1), (20, 13), (20, 14), (33, 1), (50, 999)]]
        assert lengths == [32, 32, 33, 33, 33]
        each = RopeChoice(32, True, 100)
        assert [each.length(prompt, count) for prompt, count in [(1, 1), (20, 14), (50, 999)]] == [32, 33, 99]
        whole = Attached(pooling=Pooling("embed"))
        assert each.attach(whole, 100, 1).rope_length == 100, "its last token is computed, too"

    def test_no_salt_of_a_client_meets_anothers_choice(self) -> None:
        choice = RopeChoice(32, False, 100)
        info = Info(choices=[choice], num_blocks=8)
        pool, roots = KVPool(8, 4), set()
        for salt in ("", "33", "32", "x"):
            for count in (1, 80):
                message = AddRequest(1, [1] * 10, SamplingParams(max_tokens=count), cache_salt=salt)
                (request,) = make_sequences(message, info, True, lambda: 0.0)
                pool._hash(request, 1)
                roots.add(request.block_hashes[0])
        assert len(roots) == 8


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_graph_reads_keeps_its_address(tmp_path: Path, dynamic: bool) -> None:
    rope = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=8.0), max_position_embeddings=LIMIT)
    path = make_checkpoint("llama", tmp_path, **(rope if dynamic else MODELS["llama"]))
    core = make_core(path, max_model_len=200)
    (shared,) = core.runner.hooks
    assert shared.capturable is not dynamic
    address, candidates = shared.lengths.data_ptr(), shared.candidates
    run(core, prompts_of(SHAPES), [greedy(count) for _, count in SHAPES])
    assert shared.lengths.data_ptr() == address
    assert (shared.candidates == candidates) is not dynamic
