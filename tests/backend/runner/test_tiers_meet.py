"""KV tiers beside everything else that an engine can do: a new engine whose prompts come from a tier says the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from adapters import attached, make_adapter
from model_entries import CHECKPOINT
from nightly import nightly_but

from inflight.config import EngineConfig
from inflight.engine import assembly
from inflight.engine.core import EngineCore
from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.policies import tier_admission
from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.spec import GrammarSpec
from inflight.runner.pipeline import make_runner, placed

BLOCK = 4
LENGTH = 150  # tokens of a prompt; an extent has 64
LIST = '{"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 3, "maxItems": 5}'

# Parameters of the requests of one engine; each has a prompt of its own.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "n": {"n": 3, "temperature": 0.9, "seed": 5},
    "tenant": {"tenant": "a"},
    "salt": {"cache_salt": "s", "temperature": 0.7, "seed": 6, "top_k": 20},
    "grammar": {"grammar": GrammarSpec("json_schema", LIST), "max_tokens": 60, "temperature": 0.8, "seed": 7},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "bans": {"logit_bias": {300: 4.0}, "bad_words_ids": [[300], [310, 320]], "min_tokens": 12},
    "stop": {"stop_token_ids": [300, 301], "ignore_eos": False},
    "adapter": {"adapter": "one"},
    "other adapter": {"adapter": "two", "n": 2, "temperature": 1.0, "seed": 8},
}

# Options of the engine.  Adapters are asked for where the engine can apply them.
ENGINES: list[dict[str, Any]] = [
    {"enable_lora": True},
    {"enable_lora": True, "dtype": "bfloat16"},
    {"quantization": "int8", "enable_lora": True},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8", "enable_lora": True},
    {"quantization": "int8", "kv_cache_dtype": "int8", "async_scheduling": True},
    {"native_forward": False, "attention_backend": "reference"},
    {"async_scheduling": True, "enable_lora": True},
    {"speculative_config": {"method": "suffix"}, "enable_lora": True},
    {"speculative_config": {"model": str(CHECKPOINT), "num_speculative_tokens": 3}},
    {"speculative_config": {"model": str(CHECKPOINT)}, "async_scheduling": True, "quantization": "int4"},
    {"num_gpu_blocks_override": 180, "max_model_len": 512, "enable_lora": True},  # preempts
    {"num_gpu_blocks_override": 180, "max_model_len": 512, "swap_space": "16MiB", "preemption_mode": "swap"},
    {"max_num_batched_tokens": 32, "scheduling_policy": "priority", "enable_lora": True},
    {"itl_target_ms": 5, "max_num_seqs": 3},
    {"speculative_config": {"method": "suffix"}, "async_scheduling": True, "num_gpu_blocks_override": 200}
    | {"max_model_len": 512, "kv_cache_dtype": "int8", "max_num_batched_tokens": 64},
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, str(CHECKPOINT), seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes slowly, so that any load pays, and drafts that cost nothing."""

    def free(prices: DraftPrices, num_sequences: int) -> None:
        prices.price, prices.room = 0.01, 64

    monkeypatch.setattr(tier_admission.TierAdmission, "_compute_seconds", lambda *_: 60.0)
    monkeypatch.setattr(DraftPrices, "begin", free)


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(5, 2500), k=LENGTH)


def engine(options: dict[str, Any], tiers: list[dict[str, str]]) -> EngineCore:
    fixed = {"model": str(CHECKPOINT), "device": "cpu", "dtype": "float32", "kv_cache_memory": "32MiB"}
    config = placed(
        EngineConfig.from_dict({**fixed, "block_size": BLOCK, "cpu_threads": 1, "kv_tiers": tiers, **options})
    )
    return assembly.make_core(config, make_runner(config))


def served(core: EngineCore, asked: dict[str, dict[str, Any]], adapters: dict[str, Any], turns: Any) -> dict[str, Any]:
    """Of each request that is made at once: its sequences' tokens, and how many tokens of its prompt were cached."""
    for number, (name, values) in enumerate(asked.items()):
        values = {"temperature": 0.0, "seed": 0, "max_tokens": 20, "ignore_eos": "grammar" not in values, **values}
        adapter = adapters.get(values.pop("adapter", ""))
        fields = {field: values.pop(field) for field in ("tenant", "cache_salt") if field in values}
        added = AddRequest(number, turns[name], SamplingParams(**values), attached=attached(adapter), **fields)
        assert (failure := core.add_request(added)) is None, failure
    found: dict[str, Any] = {name: ({}, []) for name in asked}
    names = list(asked)
    while core.has_work:
        message = core.step()
        assert not message.failed, message.failed
        for delta in message.deltas:
            sequences, cached = found[names[delta.request_id]]
            sequences.setdefault(delta.index, []).extend(delta.token_ids)
            cached += [delta.num_cached_tokens] if delta.num_cached_tokens is not None else []
        check_core(core)
    return found


def sequences_of(found: dict[str, Any]) -> dict[str, dict[int, list[int]]]:
    return {name: sequences for name, (sequences, _) in found.items()}


@pytest.mark.parametrize("options", nightly_but([ENGINES[0]], ENGINES), ids=str)
def test_answers_with_warm_tiers_are_those_without(
    options: dict[str, Any], adapters: dict[str, Any], tmp_path: Path
) -> None:
    """And so are those of the next turns: half of their prompts were kept as prompts, the rest as output."""
    asked = {name: values for name, values in ASKED.items() if "adapter" not in values or options.get("enable_lora")}
    turns = {name: prompt(number) for number, name in enumerate(ASKED)}
    plain = engine(options, [])
    expected = sequences_of(served(plain, asked, adapters, turns))
    longer = {name: [*turns[name], *answers[0], 9, 8] for name, answers in expected.items()}
    expected_next = sequences_of(served(plain, asked, adapters, longer))
    tiers = [
        {"type": "host", "size": "2MiB"},
        {"type": "disk", "path": str(tmp_path), "size": "64MiB"},
    ]
    writer = engine(options, tiers)
    assert sequences_of(served(writer, asked, adapters, turns)) == expected
    writer.info.tiers.close(60)
    reader = engine(options, tiers)
    found = served(reader, asked, adapters, longer)
    assert sequences_of(found) == expected_next
    cached = {name: counts[0] for name, (_, counts) in found.items()}
    assert cached.pop("prompt_logprobs") == 0
    if "num_gpu_blocks_override" in options:  # a small pool lends few blocks: who would wait for long computes
        assert reader.info.tiers.num_hits
    else:
        assert min(cached.values()) >= 64, cached
        assert reader.info.tiers.num_hits >= 64 * len(cached)
    reader.info.tiers.close(60)


def test_engines_of_two_versions_share_a_directory_that_is_too_small(tmp_path: Path) -> None:
    """Two of one version and one of another evict each other's files all the time: their answers do not change."""
    bound = 2**20
    versions: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}]
    tiers = [{"type": "disk", "path": str(tmp_path), "size": str(bound)}]
    engines = [(version, engine(versions[version], tiers)) for version in (0, 0, 1)]
    asked = {name: ASKED[name] for name in ("greedy", "n", "tenant")}
    rounds = [{name: prompt(10 * number + place) for place, name in enumerate(asked)} for number in range(3)]
    expected = [
        [sequences_of(served(plain, asked, {}, turns)) for turns in rounds] for plain in map(engine, versions, [[], []])
    ]
    seen: set[str] = set()
    for number in (0, 1, 2, 0, 1, 2):
        for version, core in engines:
            core = assembly.make_core(core.config, core.runner)  # nothing is cached
            assert sequences_of(served(core, asked, {}, rounds[number])) == expected[version][number]
            seen |= {path.name for path in tmp_path.rglob("*") if len(path.name) == 32 and path.is_file()}
    for _, core in engines:
        core.info.tiers.close(60)
        assert not core.info.tiers.tiers[0].errors
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes) <= bound + len(engines) * (bound // 32 + max(sizes))
    assert len(seen) > len(files), "some were evicted"
    assert len({path.parents[1].name for path in files if len(path.name) == 32}) == 2
    assert sum(core.info.tiers.num_hits for _, core in engines)
