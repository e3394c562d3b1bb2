"""Kernels that a switch attaches to a chosen forward pass: each by its own switch, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from inflight.kernel_config import KernelConfig
from inflight.loading.forward import switched_kernels
from inflight.loading.forward.switched_kernels import attach_kernels


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(name, other arguments) of the kernels that were attached, in order."""
    seen: list[Any] = []
    monkeypatch.setattr(switched_kernels, "split_linears", lambda model, *rest: seen.append(("split_k", rest)))
    monkeypatch.setattr(switched_kernels, "select_experts", lambda: "kernels of experts")
    monkeypatch.setattr(switched_kernels, "fuse_experts", lambda model, *rest: seen.append(("fused_experts", rest)))
    return seen


def passes() -> bool:
    return True


def test_each_switch_attaches_its_own_kernel(attached: list[Any]) -> None:
    expected = {"split_k": ("split_k", (False,)), "fused_experts": ("fused_experts", ("kernels of experts", passes))}
    for name in KernelConfig.__struct_fields__:
        attached.clear()
        attach_kernels(nn.Module(), KernelConfig(**{name: True}), passes)
        assert attached == ([expected[name]] if name in expected else []), name


def test_all_switches_together(attached: list[Any]) -> None:
    """Products of experts are compared with the logits last: what runs then is the model as it will run."""
    attach_kernels(nn.Module(), KernelConfig(**dict.fromkeys(KernelConfig.__struct_fields__, True)), passes)
    assert attached == [("split_k", (True,)), ("fused_experts", ("kernels of experts", passes))]


def test_every_entry_is_a_switch() -> None:
    assert switched_kernels._ATTACHMENTS.keys() <= set(KernelConfig.__struct_fields__)
