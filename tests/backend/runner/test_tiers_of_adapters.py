"""KV tiers that engines with and without adapters share: what the checkpoint alone computes is one KV in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import VOCAB, make_checkpoint

from inflight import LLM, LoRARequest, SamplingParams
from inflight.engine.policies import tier_admission

PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (150, 131, 70, 200)]
HAS_ADAPTER = (False, True, False, True)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gpt2", {"block_size": 3}),  # through transformers' modules
    ("llama", {"dtype": "bfloat16", "max_num_batched_tokens": 48}),
    ("llama", {"quantization": "int8"}),
    ("llama", {"kv_cache_dtype": "int8", "async_scheduling": True}),
    ("qwen3", {"max_num_batched_tokens": 37}),
    ("mixtral", {}),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes slowly, so that any load pays."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 1.0)
    torch.set_num_threads(1)


def served(folder: str, disk: Path, prompts: list[list[int]], adapters: list[Any], **options: Any) -> list[Any]:
    """Tokens of each answer, and how many of its prompt's were cached; one batch of a new engine."""
    tiers = [{"type": "disk", "path": str(disk), "size": "64MiB"}]
    fixed = {"kv_cache_memory": "16MiB", "block_size": 4, "dtype": "float32", "kv_tiers": tiers}
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    with LLM(folder, **{**fixed, **options}) as llm:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(asked, params, lora_request=adapters if any(adapters) else None)
    return [(list(one.outputs[0].token_ids), one.num_cached_tokens) for one in found]


def extents(disk: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in disk.rglob("*") if path.is_file() and len(path.name) == 32}


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*one, marks=() if one is CASES[0] else pytest.mark.nightly) for one in CASES],
)
def test_requests_without_an_adapter_have_the_kv_of_an_engine_without_adapters(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Bit by bit, though other rows of their steps have adapters; and it is found both ways."""
    folder = make_checkpoint(kind, tmp_path / "model")
    make_adapter(tmp_path / "adapter", folder, strength=1.5)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    chosen, nothing = [adapter if has else None for has in HAS_ADAPTER], [None] * len(PROMPTS)
    plain, mixed = tmp_path / "plain", tmp_path / "mixed"
    wanted = served(folder, plain, PROMPTS, nothing, **options)
    found = served(folder, mixed, PROMPTS, chosen, enable_lora=True, **options)
    assert [one == other for one, other in zip(found, wanted)] == [not has for has in HAS_ADAPTER]
    ours, theirs = extents(mixed), extents(plain)
    same = ours.keys() & theirs.keys()
    assert len(same) >= 5 and all(ours[name] == theirs[name] for name in same)
    assert len(ours) == len(theirs) > len(same), "KV of an adapter is its own"
    for disk, has_lora in ((plain, True), (mixed, False)):
        [(tokens, cached)] = served(folder, disk, PROMPTS[:1], [None], enable_lora=has_lora, **options)
        assert tokens == wanted[0][0] and cached >= 64
