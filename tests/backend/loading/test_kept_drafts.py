"""Kept weights of an engine that drafts with a small model: both models are kept, reused, and say the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from inflight import LLM, SamplingParams
from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.kernels.cpu import library
from inflight.loading.startup import wait_until_kept

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

PROMPT = {"prompt_token_ids": [3 + n * n % 90 for n in range(30)]}


def free(prices: DraftPrices, num_sequences: int) -> None:
    prices.price, prices.room = 0.01, 64


@pytest.mark.nightly  # eight loads
def test_a_model_and_its_draft_model_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then without either of their files: what is missing is loaded in full, and kept again."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DraftPrices, "begin", free)
    torch.set_num_threads(1)
    path = make_checkpoint("llama", tmp_path / "model")
    draft = make_checkpoint("llama", tmp_path / "draft", seed=5, num_hidden_layers=1)
    kept = tmp_path / "cache" / "weights"

    def start(draft: str | None) -> tuple[list[int], int]:
        """The answer, and how many models were loaded in full."""
        caplog.clear()
        speculative = {} if draft is None else {"speculative_config": {"model": draft, "num_speculative_tokens": 3}}
        options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "8MiB", "device": "cpu", **speculative}
        with caplog.at_level(logging.INFO, "inflight"), LLM(path, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            [result] = llm.generate([PROMPT], params)
            if draft is not None:
                assert llm.core.scheduler.policies.draft_counts.tokens
        wait_until_kept()
        phases = [record.message for record in caplog.records if record.name == "inflight.load_phases"]
        return result.outputs[0].token_ids, phases.count("reading the weights")

    expected, num_in_full = start(None)
    assert num_in_full == 1
    assert start(draft) == (expected, 1)
    files = sorted(kept.glob("*.iw"))
    assert len(files) == 2, "the draft model's are kept, too"
    assert start(draft) == (expected, 0)
    for file in files:
        file.unlink()
        assert start(draft) == (expected, 1)
        assert sorted(kept.glob("*.iw")) == files
    with files[0].open("r+b") as changed:
        changed.seek(-100_000, 2)
        changed.write(b"\xff" * 64)
    assert start(draft) == (expected, 1)
    assert [start(path) for _ in range(2)] == [(expected, 1), (expected, 0)]  # it drafts for itself, in another form
