"""Importance of inputs, as random tokens show it, against transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from inflight.attention.hf import IMPLEMENTATION
from inflight.loading.quantization.input_squares import mean_squares

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]


def test_they_are_those_of_transformers_and_the_model_is_as_before(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
    threads, vocab_size = torch.get_num_threads(), model.config.vocab_size
    found = mean_squares(model, NAMES, vocab_size)
    assert model.config._attn_implementation == IMPLEMENTATION and torch.get_num_threads() == threads
    assert not any(module._forward_pre_hooks for module in model.modules())

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    inputs: dict[str, Tensor] = {}
    for name in NAMES:
        plain.get_submodule(name).register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
    with torch.inference_mode():
        plain(torch.randint(vocab_size, (4, 32), generator=torch.Generator().manual_seed(0)))
    for name in NAMES:
        squares = inputs[name].square().mean((0, 1))
        assert torch.allclose(found[name], squares / squares.mean() + 1e-4, rtol=1e-4)


def test_threads_change_no_bit_and_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
    before = torch.get_num_threads()
    try:
        several = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            several.append(mean_squares(model, NAMES, model.config.vocab_size))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(several[0][name], several[1][name]) for name in NAMES)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
    assert mean_squares(model, NAMES, model.config.vocab_size).keys() == {NAMES[0]}
    assert mean_squares(model, [], model.config.vocab_size) == {}
