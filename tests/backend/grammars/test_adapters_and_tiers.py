"""Grammars beside adapters and KV tiers: valid answers, with the tokens of merged weights and of no tiers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter, merged_checkpoint

from inflight import LLM, LoRARequest, SamplingParams
from inflight.engine.policies import tier_admission

from .conftest import DEMO

LIST = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["book", "film"]}, "tags": LIST},
    "required": ["kind", "tags"],
    "additionalProperties": False,
}
OPTIONS = dict(dtype="float32", kv_cache_memory="8MiB", device="cpu", block_size=4)
PROMPTS: list[Any] = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (9, 90)]


def params(temperature: float = 1.0, n: int = 1) -> SamplingParams:
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    return SamplingParams(temperature=temperature, seed=3, n=n, max_tokens=200, structured_outputs=form)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """Of answers that all validate."""
    for one in [sequence for output in outputs for sequence in output.outputs]:
        answer = json.loads(one.text)
        assert answer["kind"] in ("book", "film") and 2 <= len(answer["tags"]) <= 3
        assert all(isinstance(tag, str) and len(tag) <= 8 for tag in answer["tags"])
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def test_an_adapter_answers_under_a_grammar_as_its_merged_weights_do(checkpoint: str, tmp_path: Path) -> None:
    ref = make_adapter(tmp_path / "one", checkpoint, strength=1.0)
    merged = merged_checkpoint(checkpoint, ref, tmp_path / "merged")
    shutil.copy(DEMO, merged)
    with LLM(checkpoint, enable_lora=True, **OPTIONS) as llm, LLM(merged, **OPTIONS) as other:
        for temperature in (0.0, 1.0):
            wanted, adapters = params(temperature, n=2), [LoRARequest("mine", 1, ref.path)] * 2
            both = llm.generate([*PROMPTS, *PROMPTS], wanted, lora_request=[*adapters, None, None])
            assert tokens_of(both[:2]) == tokens_of(other.generate(PROMPTS, wanted))
            assert tokens_of(both[2:]) != tokens_of(both[:2])


def test_a_prompt_from_a_tier_is_answered_under_a_grammar_as_a_computed_one(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 1.0)  # any load pays
    tiers = [{"type": "disk", "path": str(tmp_path / "kv"), "size": "64MiB"}]
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = tokens_of(llm.generate(PROMPTS[1:], params()))
    cached = []
    for _ in range(2):
        with LLM(checkpoint, kv_tiers=tiers, **OPTIONS) as llm:
            found = llm.generate(PROMPTS[1:], params())
            assert tokens_of(found) == expected
            cached.append(found[0].num_cached_tokens)
    assert cached[0] == 0 < cached[1]
