"""Drafts on a model with real weights: no token changes, and texts that repeat their prompt are drafted well."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from real_chats import RealChats

from inflight import LLM, SamplingParams
from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.engine.integrity import check_core

pytestmark = [pytest.mark.nightly]


@pytest.fixture(scope="module")
def asked(smollm2: Path) -> list[tuple[list[int], SamplingParams]]:
    """Two chats of each work, greedy and sampled."""
    chats = RealChats()
    found = []
    for name in chats.works:
        for seed in range(2):
            prompt, sampling = chats.request(name, random.Random(f"{name} {seed}"))
            found += [
                (prompt, SamplingParams(max_tokens=64, seed=seed, **options))
                for options in ({"temperature": 0.0}, sampling, {"temperature": 1.0})
            ]
    return found


def answered(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    results = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    check_core(llm.core)
    return [(one.token_ids, one.text, one.finish_reason) for result in results for one in result.outputs]


def free_drafts(prices: DraftPrices, num_sequences: int) -> None:
    prices.price, prices.room = 0.01, 64


def test_no_token_changes(
    smollm2: Path, asked: list[tuple[list[int], SamplingParams]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPrices, "begin", free_drafts)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "512MiB", "max_model_len": 2048}
    plain = answered(LLM(str(smollm2), **options), asked)
    for method, more in (("suffix", {"async_scheduling": True}), ("suffix", {}), ("ngram", {})):
        llm = LLM(str(smollm2), **options, **more, speculative_config={"method": method})
        assert answered(llm, asked) == plain, method
        counts = llm.core.scheduler.policies.draft_counts
        assert counts.tokens > counts.accepted > 100, "some were right, some were not"
