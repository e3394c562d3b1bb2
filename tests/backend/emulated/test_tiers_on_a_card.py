"""KV tiers of engines on an emulated card: tokens are those of the CPU without tiers, whatever the tiers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from card_rig import card_core, functions_as_kernels, without_waits
from checkpoints import make_checkpoint
from emulated_card import Card
from every_kind import every_kind, prompt_of, work_of
from offline import make_core

from inflight.engine.core import EngineCore
from inflight.engine.policies import tier_admission

LIMITS: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("card"))


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)
    monkeypatch.setattr(tier_admission, "_UNMEASURED_GPU_SECONDS", 1.0)


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str) -> EngineCore:
    return make_core(checkpoint, **LIMITS, seed=1)


def test_x(card: Card, checkpoint: str, on_the_cpu: EngineCore, tmp_path: Path) -> None:
    prompts = [prompt_of(1, 40), prompt_of(2, 45)]
    params = [every_kind(i) for i in range(2)]
    expected = work_of(on_the_cpu, prompts, params, stagger=2)
    tiers = [{"type": "disk", "path": str(tmp_path), "size": "64MiB"}]
    for _ in range(2):
        core = without_waits(card_core(checkpoint, seed=1, block_size=4, kv_tiers=tiers))
        assert work_of(core, prompts, params, stagger=2) == expected
        core.info.tiers.close()
        print(core.info.tiers.totals(), core.info.tiers.extent_blocks)
