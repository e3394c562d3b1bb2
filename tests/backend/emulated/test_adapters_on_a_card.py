"""Adapters on an emulated card: the tokens of merged weights, from graphs and eager steps, without waits of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import attached, make_adapter, merged_checkpoint
from card_rig import card_core, functions_as_kernels, num_replays, without_waits
from checkpoints import greedy_reference, make_checkpoint
from emulated_card import Card, emulated_card
from every_kind import prompt_of
from offline import make_core, run, tokens

from inflight.engine.adapter import AdapterRef
from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams

GREEDY = dict(temperature=0.0, ignore_eos=True, seed=0)
LENGTHS = (3, 20, 9, 14, 31, 6)
COUNT = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def refs(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    targets = [None, ["q_proj", "v_proj", "down_proj"], ["o_proj", "up_proj"], ["k_proj", "gate_proj"]]
    return [
        make_adapter(folder / f"a{i}", checkpoint, own, seed=i, rank=4 + 3 * i, strength=1.5)
        for i, own in enumerate(targets)
    ]


@pytest.fixture(scope="module")
def expected(
    checkpoint: str, refs: list[AdapterRef], tmp_path_factory: pytest.TempPathFactory
) -> list[list[list[int]]]:
    """Of each adapter's merged weights, then of the checkpoint: the tokens of each prompt."""
    folder = tmp_path_factory.mktemp("merged")
    paths = [*(merged_checkpoint(checkpoint, ref, folder / ref.name) for ref in refs), checkpoint]
    return [greedy_reference(path, prompts(), [COUNT] * len(LENGTHS)) for path in paths]


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


@pytest.fixture
def card() -> Any:
    with emulated_card() as made:
        yield made


def prompts() -> list[list[int]]:
    return [prompt_of(i, length) for i, length in enumerate(LENGTHS)]


def lora_core(path: str, refs: list[AdapterRef], **options: Any) -> EngineCore:
    """The adapters are in host memory, so that requests start in the order of their arrival."""
    core = card_core(path, enable_lora=True, **{"enforce_eager": True, **options})
    assert core.info.adapters is not None
    for ref in refs:
        core.info.adapters.load(ref).result(60)
    return without_waits(core)


def generated(core: EngineCore, chosen: list[AdapterRef | None], stagger: int = 1) -> list[list[int]]:
    params = [SamplingParams(max_tokens=COUNT, **GREEDY)] * len(chosen)
    deltas = run(core, prompts()[: len(chosen)], params, stagger, attached=[attached(ref) for ref in chosen])
    return [tokens(deltas[i, 0]) for i in range(len(chosen))]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": False}, {"enforce_eager": False, "max_cudagraph_capture_size": 16}])
def test_tokens_are_those_of_merged_weights(
    checkpoint: str, refs: list[AdapterRef], expected: Any, card: Card, options: dict[str, Any]
) -> None:
    """Four adapters and none in a batch, whose requests arrive one after another."""
    core = lora_core(checkpoint, refs, **options)
    kinds = [0, 4, 1, 2, 3, 4]
    chosen = [*refs, None]
    assert generated(core, [chosen[kind] for kind in kinds]) == [expected[kind][i] for i, kind in enumerate(kinds)]
