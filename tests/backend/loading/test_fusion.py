"""The native decoder: which models it takes, that it says what they say, and what happens when it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from inflight.attention.base import AttentionMetadata, forward_context
from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu import ops as cpu
from inflight.loading import fusion, loader
from inflight.loading.fusion import FusedDecoder
from inflight.loading.loader import LoadError, load
from inflight.loading.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"no compiled kernel: {cpu.unavailable()}")

FUSED = {"llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "smollm3"}
BLOCK = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("fusion"), max_position_embeddings=1024)


def loaded(path: str, **options: Any) -> Any:
    values = {"model": path, "device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", **options}
    return load(EngineConfig.from_dict(values)).model


@torch.inference_mode()
def logits(forward: Any, token_ids: list[int], chunk: int = 10**6, kept: Tensor | int = 0) -> Tensor:
    """float32 [len(token_ids) or K, V] of one sequence, in steps of `chunk` tokens."""
    parts = []
    for start in range(0, len(token_ids), chunk):
        end = min(start + chunk, len(token_ids))
        slots = torch.arange(start, end)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=torch.arange(-(-end // BLOCK), dtype=torch.int32)[None],
            slot_mapping=slots,
            query_starts=[0, end - start],
            lens=[end],
            max_query_len=end - start,
            max_seq_len=end,
            block_size=BLOCK,
        )
        ids = torch.tensor([token_ids[start:end]])
        with forward_context(metadata):
            out = forward(input_ids=ids, position_ids=slots[None], use_cache=False, logits_to_keep=kept)
        parts.append(out.logits[0].float())
    return torch.cat(parts)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_llama_family_is_fused_and_the_others_are_packed(model_type: str, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path)
    forward = loaded(path)
    assert isinstance(forward, FusedDecoder) == (model_type in FUSED)
    if isinstance(forward, nn.Module):
        kinds = {type(module) for module in forward.modules()}
        assert PackedLinear in kinds and nn.Linear not in kinds
    sequence = tokens(100)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence])).logits[0]
    result = logits(forward, sequence)
    assert ((result - expected).norm() / expected.norm()).item() < 1e-4


def test_a_token_is_the_same_to_the_last_bit_in_any_step_on_any_threads(llama: str) -> None:
    forward = loaded(llama)
    sequence = tokens(500)  # more than one chunk of rows a thread
    whole = logits(forward, sequence)
    assert torch.equal(logits(forward, sequence, chunk=7), whole)
    assert torch.equal(logits(forward, sequence, chunk=130), whole)
    torch.set_num_threads(2)
    assert torch.equal(logits(forward, sequence), whole)
    assert torch.equal(logits(forward, sequence, chunk=60), whole)


def test_only_the_kept_tokens_get_logits(llama: str) -> None:
    forward = loaded(llama)
    sequence = tokens(300)
    whole = logits(forward, sequence)
    assert torch.equal(logits(forward, sequence, kept=torch.tensor([299, 0, 17])), whole[[299, 0, 17]])
    assert torch.equal(logits(forward, sequence, kept=2), whole[-2:])
    assert logits(forward, sequence, kept=torch.empty(0, dtype=torch.int64)).shape == (0, VOCAB)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_to_float32_as_transformers_own(llama: str, dtype: str) -> None:
    sequence = tokens(200, seed=3)
    models = {
        kind: AutoModelForCausalLM.from_pretrained(llama, dtype=kind, attn_implementation="eager").eval()
        for kind in (torch.float32, getattr(torch, dtype))
    }
    with torch.inference_mode():
        exact, own = (model(torch.tensor([sequence])).logits[0].float() for model in models.values())
    ours = logits(loaded(llama, dtype=dtype), sequence)
    assert (ours - exact).norm() <= 1.05 * (own - exact).norm()


def test_biases_multipliers_and_partial_rotation(tmp_path: Path) -> None:
    changes = dict(
        attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)
    )
    path = make_checkpoint("llama", tmp_path, **changes)
    forward = loaded(path)
    assert isinstance(forward, FusedDecoder)
    sequence = tokens(50)
    plain = logits(loaded(path, native_forward=False), sequence)
    assert ((logits(forward, sequence) - plain).norm() / plain.norm()).item() < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_weights_in_eight_bits_cost_a_few_per_cent(model_type: str, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path)
    plain, quantized = loaded(path), loaded(path, quantization="int8")
    assert type(plain) is type(quantized)
    sequence = tokens(60)
    expected, result = logits(plain, sequence), logits(quantized, sequence)
    assert 1e-3 < ((result - expected).norm() / expected.norm()).item() < 0.15
    if isinstance(quantized, FusedDecoder):
        assert torch.equal(logits(quantized, sequence, chunk=7), result)


def test_keys_and_values_in_eight_bits_go_through_the_native_decoder(llama: str) -> None:
    forward = loaded(llama, kv_cache_dtype="int8")
    assert isinstance(forward, FusedDecoder)
    sequence = tokens(60)
    plain = logits(loaded(llama, kv_cache_dtype="int8", native_forward=False), sequence)
    assert ((logits(forward, sequence) - plain).norm() / plain.norm()).item() < 1e-2


def test_eight_bits_that_cost_too_much_are_refused(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="runs on a CPU with native_forward"):
        loaded(llama, quantization="int8", native_forward=False)
    monkeypatch.setattr(loader, "_INT8_TOLERANCE", 1e-4)
    with pytest.raises(LoadError, match=r'quantization="int8" cannot be served: LlamaForCausalLM gives other logits'):
        loaded(llama, quantization="int8")


def test_native_forward_can_be_switched_off(llama: str) -> None:
    forward = loaded(llama, native_forward=False)
    assert isinstance(forward, nn.Module)
    assert PackedLinear not in {type(module) for module in forward.modules()}


def test_a_rotation_that_depends_on_the_length_is_left_to_transformers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0))
    assert not isinstance(loaded(path), FusedDecoder)


def test_a_decoder_that_is_off_is_taken_back(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(loaded(llama, native_forward=False), tokens(40))
    forward = cpu.forward
    monkeypatch.setattr(fusion.native, "forward", lambda *args: forward(*args) * 1.01)
    with caplog.at_level(logging.WARNING):
        model = loaded(llama)
    assert "LlamaForCausalLM runs through transformers: the native forward pass gives other logits" in caplog.text
    assert isinstance(model, nn.Module)
    result = logits(model, tokens(40))
    assert ((result - expected).norm() / expected.norm()).item() < 1e-5, "its weights came back"


def test_packed_layers_that_are_off_are_taken_back(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusion.native, "unavailable", lambda: "the compiled kernel")
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_ones(*x.shape[:-1], self.out_features))
    with caplog.at_level(logging.INFO):
        model = loaded(llama)
    assert "runs through transformers: this installation lacks the compiled kernel" in caplog.text
    assert "runs on torch's linear layers" in caplog.text
    assert PackedLinear not in {type(module) for module in model.modules()}
