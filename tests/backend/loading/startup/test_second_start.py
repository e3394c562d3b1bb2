"""A start from kept weights gives the bits of a full load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from startup_rig import CHAIN, config, in_codes, is_reused, logits, start

from inflight.config import ConfigError
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.stored_codes import StoredCodes
from inflight.loading import startup
from inflight.loading.draft_length import agreed_length
from inflight.loading.forward.native_adapters import NativeAdapters

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

Log = pytest.LogCaptureFixture


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    ],
    ids=["float32", "bfloat16", "int8", "int8 twice"],
)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_logits_of_the_second_start_are_those_of_the_first(
    model: str, options: dict[str, str], cache: Path, caplog: Log, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    first = start(path, **options)
    assert not is_reused(caplog)
    second = start(path, **options, max_num_seqs=7, cpu_threads=1)
    assert is_reused(caplog)
    assert all(map(np.array_equal, logits(first), logits(second)))
    facts = ["max_model_len", "vocab_size", "eos_token_ids", "dtype", "device", "attention_backend"]
    assert [getattr(first.info, fact) for fact in facts] == [getattr(second.info, fact) for fact in facts]
    assert second.info.grammars is not None
    assert second.layers.bytes_per_block == first.layers.bytes_per_block


def parts_of(weight: PackedWeight | None) -> list[PackedWeight]:
    return [] if weight is None else [weight, *parts_of(weight.further)]


@pytest.mark.parametrize(
    "stored, options",
    [
        ("gptq", {}),
        (CHAIN, {"dtype": "bfloat16"}),
        ("awq", {"quantization": "int8"}),  # of the layer that is left
        ("int-quantized tensor", {}),
        ("Q4_0", {}),
        ("Q4_K", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("Q6_K", {}),
    ],
)
def test_codes_of_a_checkpoint_are_kept_as_they_are(
    stored: str, options: dict[str, str], tmp_path: Path, cache: Path, caplog: Log
) -> None:
    path = in_codes(stored, tmp_path)
    first, second = (start(path, **{"dtype": "float32", **options}) for _ in range(2))
    assert all(map(np.array_equal, logits(first), logits(second)))
    found, kept = (parts_of(loaded.model.tables.layers[1].qkv) for loaded in (first, second))
    assert len(found) == len(kept) == (3 if stored == CHAIN else 1)
    for weight, other in zip(found, kept):
        assert weight.struct.dtype == other.struct.dtype == StoredCodes.dtype
        assert torch.equal(weight.panels, other.panels)
    caplog.clear()
    start(path, **{"dtype": "float32", **options})
    assert is_reused(caplog)


def test_the_length_of_requests_with_a_draft_model_is_remembered_by_content(
    llama: str, qwen3: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def agreed(draft: str, **options: Any) -> int:
        return agreed_length(config(llama, **options), config(draft), lambda: asked.append(0) or 100 + len(asked))

    assert [agreed(qwen3), agreed(qwen3), agreed(llama), agreed(qwen3, max_model_len=32)] == [101, 101, 102, 103]
    notes = list(cache.glob("*.length"))
    assert len(notes) == 3
    for note in notes:
        content = bytearray(note.read_bytes())
        content[content.index(b"length") + 6] ^= 1
        note.write_bytes(content)
    assert agreed(qwen3) == 104 and agreed(qwen3) == 104
    monkeypatch.setattr(startup, "instruction_set", lambda: "avx9")
    assert agreed(qwen3) == 105
    monkeypatch.setenv("INFLIGHT_CACHE", "off")
    assert [agreed(qwen3), agreed(qwen3)] == [106, 107]

    def refused() -> int:
        raise ConfigError("vocabulary")

    monkeypatch.delenv("INFLIGHT_CACHE")
    monkeypatch.setenv("INFLIGHT_CACHE", str(cache.parent / "other"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="vocabulary"):
            agreed_length(config(llama), config(qwen3), refused)


def test_kept_weights_know_where_adapters_belong(llama: str, cache: Path, caplog: Log) -> None:
    first = NativeAdapters(start(llama, dtype="float32").model)
    assert not is_reused(caplog)
    second = NativeAdapters(start(llama, dtype="float32").model)
    assert is_reused(caplog)
    assert first.layers == second.layers and len(first.layers) == 14
    assert second.layers["model.layers.1.mlp.down_proj"] == (48, 32)
