"""KV tiers under a model with real weights: what comes from a tier gives the bits of what was computed, and no engine
reads what one of another kind, or for another adapter, has left in the same folder."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from adapters import make_adapter
from transformers_answers import Answers

from inflight import LLM, LoRARequest, SamplingParams
from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.engine.integrity import check_core
from inflight.engine.policies import tier_admission

LENGTH = 272  # tokens of the document
WHOLE = 240  # of these, tokens of whole extents, which have 16 or, with int8 KV, 80
QUESTIONS = ("Summarise this.", "Quote one sentence of it.", "Write the first example again.")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=5),
    SamplingParams(temperature=0.8, seed=4, max_tokens=16, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.2, ignore_eos=True),
]
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int4 with int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "GGUF": {},
    "adapters": {"enable_lora": True},
}
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "suffix"}, "async_scheduling": True}  # of the second engines


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes slowly, so that any load pays, and on which drafts cost nothing."""

    def free(prices: DraftPrices, num_sequences: int) -> None:
        prices.price, prices.room = 0.01, 64

    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 1.0)
    monkeypatch.setattr(tier_admission, "_MEASURED_TOKENS", 10**6)
    monkeypatch.setattr(DraftPrices, "begin", free)


def answered(llm: LLM, prompts: list[list[int]], lora: LoRARequest | None = None) -> list[Any]:
    """Everything that callers get, with all digits."""
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(asked, PARAMS, lora_request=lora)
    check_core(llm.core)
    return [
        (one.token_ids, one.text, one.finish_reason, one.cumulative_logprob, one.logprobs)
        for result in results
        for one in result.outputs
    ]


def num_hits(llm: LLM) -> int:
    return llm.core.scheduler.policies.tier_totals().hits_total


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_folder_of_many_kinds_gives_each_its_own(
    smollm2: Path, smollm2_gguf: Path, answers: Answers, tmp_path: Path
) -> None:
    ids = answers.tokenizer(topics["for"] + topics["lambda"] + topics["while"]).input_ids[:LENGTH]
    prompts = [answers.chat(f"{answers.tokenizer.decode(ids)}\n\n{question}") for question in QUESTIONS]
    adapter = LoRARequest("one", 1, make_adapter(tmp_path / "one", str(smollm2), rank=8, strength=0.8).path)
    tiers = [{"type": "disk", "path": str(tmp_path / "kv"), "size": "1GiB"}]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "96MiB"}
    computed: dict[str, list[Any]] = {}
    for turn, drafts in enumerate(({}, DRAFTS)):
        for kind, more in KINDS.items():
            model = str(smollm2_gguf if kind == "GGUF" else smollm2)
            hits = 0
            with LLM(model, kv_tiers=tiers, **{**options, **more, **drafts}) as llm:
                for name, lora in {kind: None, **({"adapter": adapter} if kind == "adapters" else {})}.items():
                    found = answered(llm, prompts, lora)
                    assert found == computed.setdefault(name, found), name
                    assert num_hits(llm) >= hits + WHOLE if turn else num_hits(llm) == 0, name
                    hits = num_hits(llm)
                assert llm.core.scheduler.policies.draft_counts.accepted > 0 or not turn, kind
    assert computed["float32"][0][0] == answers.tokens(prompts[0], 16)
    assert computed["adapters"] == computed["float32"]
    assert len({found[0][3] for found in computed.values()}) == len(computed) - 1, "each kind has its own numbers"
