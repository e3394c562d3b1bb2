"""KV tiers of an engine on a GPU; skipped without one.  Requires the backend's dependencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import VOCAB, make_checkpoint
from offline import make_core, run, tokens

from inflight.engine.policies import tier_admission
from inflight.engine.sampling_params import SamplingParams

PROMPTS = [[(7 * n * n + 3 * n + k) % VOCAB for n in range(sized(150, 40))] for k in range(sized(4, 1))]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=sized(20, 4), ignore_eos=True)] * len(PROMPTS)


# Without a card, kernels run in the interpreter; emulated/test_tiers_on_a_card.py has the other options.
@pytest.mark.parametrize("options", [{}, *sized([{"kv_cache_dtype": "fp8"}, {"swap_space": "16MiB"}], [])])
def test_a_conversation_returns_in_a_new_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(tier_admission, "_UNMEASURED_GPU_SECONDS", 1.0)
    monkeypatch.setattr(tier_admission, "_MEASURED_TOKENS", 10**6)  # any load pays
    path = make_checkpoint("llama", tmp_path, head_dim=64)
    tiers = [{"type": "host", "size": "1MiB"}, {"type": "disk", "path": str(tmp_path / "kv"), "size": "64MiB"}]
    limits = dict(device="cuda", block_size=sized(16, 2), **sized({}, dict(max_num_seqs=4, enforce_eager=True)))
    found, hits = [], []
    for used in ([], tiers, tiers):
        core = make_core(path, kv_tiers=used, **limits, **options)
        deltas = run(core, PROMPTS, PARAMS, stagger=2)
        found.append([tokens(deltas[number, 0]) for number in range(len(PROMPTS))])
        if core.info.tiers is not None:
            core.info.tiers.close()
            hits.append(core.info.tiers.num_hits)
            assert not any(tier.errors_total for tier in core.info.tiers.totals().tiers)
    assert found[0] == found[1] == found[2]
    assert hits[1] >= hits[0] and hits[1] >= sized(64, 32)
