"""Packing a model's linear layers in place, and undoing it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from inflight.kernels.cpu import library
from inflight.loading.forward import packed_linear
from inflight.loading.forward.packed_linear import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


class Tied(nn.Module):
    """Embedding, two layers, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 24)
        self.body = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24, bias=False))
        self.odd = nn.Bilinear(24, 24, 3)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(ids)))


def test_a_packed_model_computes_the_same_with_a_single_copy_of_its_weights() -> None:
    model = Tied()
    ids = torch.arange(12).view(2, 6)
    expected = model(ids)
    linears = [model.body[0], model.body[2]]
    assert pack_linears(model) is not None
    assert [type(model.body[0]), type(model.body[2]), type(model.head)] == [PackedLinear] * 3
    torch.testing.assert_close(model(ids), expected)
    assert all(module.weight.numel() == 0 for module in linears), "the plain weights are freed"
    assert model.embedding.weight.shape == (50, 24), "the embedding keeps the weight it shares with the head"
    assert "in_features=24, out_features=40, dtype=torch.float32" in repr(model.body[0])


def test_undo_restores_modules_and_weights_exactly() -> None:
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    undo = pack_linears(model)
    assert undo is not None
    undo()
    assert [type(model.body[0]), type(model.body[2]), type(model.head)] == [nn.Linear] * 3
    assert model.head.weight is model.embedding.weight
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unsupported_layers_are_unchanged() -> None:
    model = Tied().double()
    assert pack_linears(model) is None
    assert type(model.head) is nn.Linear
    half = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)).bfloat16().requires_grad_(False)
    assert pack_linears(half) is not None
    assert [type(module) for module in half] == [nn.Linear, PackedLinear], "an odd number of features in bfloat16"


def test_without_the_compiled_kernels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "unavailable", lambda: "the CPU kernels are not compiled")
    model = Tied()
    assert pack_linears(model) is None
    assert type(model.head) is nn.Linear


def test_shared_layers_and_shared_weights() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    model = nn.Sequential(one, nn.Sequential(one), other).requires_grad_(False)
    x = torch.randn(3, 8)
    expected = model(x)
    undo = pack_linears(model)
    assert undo is not None
    assert model[0] is model[1][0]
    torch.testing.assert_close(model(x), expected)
    undo()
    assert torch.equal(model(x), expected)
