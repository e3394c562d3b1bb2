"""Importance of inputs, as random tokens show it, against transformers."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from inflight.attention.hf import IMPLEMENTATION
from inflight.loading.quantization import input_squares
from inflight.loading.quantization.input_squares import mean_squares

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    path = make_checkpoint("llama", tmp_path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION)


def sizes_of_runs(model: Any) -> list[tuple[int, ...]]:
    """Is filled with the size of the token ids of each run."""
    found: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: found.append(tuple(args[0].shape)))
    return found


def test_they_are_those_of_transformers_and_the_model_is_as_before(model: Any) -> None:
    threads = torch.get_num_threads()
    found = mean_squares(model, NAMES, model.config)
    assert model.config._attn_implementation == IMPLEMENTATION and torch.get_num_threads() == threads
    assert not any(module._forward_pre_hooks for module in model.modules())

    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    inputs: dict[str, Tensor] = {}
    for name in NAMES:
        plain.get_submodule(name).register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
    with torch.inference_mode():
        plain(torch.randint(model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0)))
    for name in NAMES:
        squares = inputs[name].square().mean((0, 1))
        assert torch.allclose(found[name], squares / squares.mean() + 1e-4, rtol=1e-4)


def test_weights_in_bfloat16_are_read_in_float32(model: Any) -> None:
    model.to(torch.bfloat16)
    found, expected = (mean_squares(each, NAMES, model.config) for each in (model, copy.deepcopy(model).float()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_one_thread_runs_it_so_that_the_order_of_additions_is_the_same(model: Any) -> None:
    before, found = torch.get_num_threads(), []
    model.model.norm.register_forward_hook(lambda *_: found.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        mean_squares(model, NAMES, model.config)
    finally:
        torch.set_num_threads(before)
    assert found == [1]


def test_numbers_that_are_not_finite_are_left_out(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
    assert mean_squares(model, NAMES, model.config).keys() == {NAMES[0]}
    assert mean_squares(model, [], model.config) == {}


def test_the_head_is_computed_only_if_it_is_asked_for(model: Any) -> None:
    calls: list[object] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(None))
    assert mean_squares(model, NAMES, model.config).keys() == set(NAMES) and not calls
    assert mean_squares(model, ["lm_head"], model.config).keys() == {"lm_head"} and calls


@pytest.mark.parametrize(
    ("weights", "size"),
    [(10**8, (4, 32)), (10**9, (4, 32)), (2 * 10**9, (2, 32)), (7 * 10**9, (1, 18)), (16 * 10**9, (1, 16))],
)
def test_a_larger_model_runs_fewer_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch, weights: int, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(input_squares, "num_weights", lambda _: weights)
    sizes = sizes_of_runs(model)
    assert mean_squares(model, NAMES, model.config).keys() == set(NAMES)
    assert sizes == [size]


def test_a_model_that_would_take_minutes_is_not_measured(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(input_squares, "num_weights", lambda _: 70 * 10**9)
    sizes = sizes_of_runs(model)
    assert mean_squares(model, NAMES, model.config) == {} and not sizes
    assert "the model has 70 billion weights, and measuring is for at most 16 billion" in caplog.text


def test_no_token_is_beyond_the_positions_of_the_model(tmp_path: Path) -> None:
    """A table of them has no row for another."""
    path = make_checkpoint("opt", tmp_path, max_position_embeddings=20)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
    sizes, names = sizes_of_runs(model), ["model.decoder.layers.1.fc1"]
    assert mean_squares(model, names, model.config).keys() == set(names)
    assert sizes == [(4, 20)]


def test_an_input_can_have_a_name_or_rows_in_a_line(model: Any) -> None:
    expected, mlp = mean_squares(model, NAMES, model.config)[NAMES[1]], model.model.layers[1].mlp

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(rows)) * mlp.up_proj(rows)).view(x.shape)

    mlp.forward = forward
    assert torch.allclose(mean_squares(model, NAMES, model.config)[NAMES[1]], expected, rtol=1e-5)


def test_layers_before_a_failure_are_measured(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise NameError("no such kernel")

    model.model.layers[1].mlp.forward = fails
    with caplog.at_level(logging.WARNING):
        assert mean_squares(model, NAMES, model.config).keys() == {NAMES[0]}
    assert "inputs of 1 of 2 linear layers cannot be measured: NameError: no such kernel" in caplog.text
    assert model.config._attn_implementation == IMPLEMENTATION
    assert not any(module._forward_pre_hooks for module in model.modules())
