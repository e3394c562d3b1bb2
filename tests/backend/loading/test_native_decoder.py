"""The native decoder: its logits are those of transformers, and if not, the model runs without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, POSITIONS, VOCAB, make_checkpoint
from nightly import ARCHITECTURES_IN_SHORT, nightly_but
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from inflight.attention.base import AttentionMetadata, forward_context
from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu import library
from inflight.loading.forward import native_decoder
from inflight.loading.forward.native_decoder import NativeDecoder
from inflight.loading.forward.packed_linear import PackedLinear
from inflight.loading.loader import LoadedModel, LoadError, load
from inflight.loading.quantization.int8 import Int8

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

BLOCK = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("native"), max_position_embeddings=1024)


def loaded(path: str, **options: Any) -> LoadedModel:
    values = {"model": path, "device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", **options}
    return load(EngineConfig.from_dict(values))


@torch.inference_mode()
def logits(loaded: LoadedModel, token_ids: list[int], chunk: int = 10**6, keep: Tensor | int = 0) -> Tensor:
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
            query_start_loc_cpu=[0, end - start],
            seq_lens_cpu=[end],
            max_query_len=end - start,
            max_seq_len=end,
            block_size=BLOCK,
        )
        ids = torch.tensor([token_ids[start:end]])
        with forward_context(metadata, loaded.backend):
            out = loaded.model(input_ids=ids, position_ids=slots[None], use_cache=False, logits_to_keep=keep)
        parts.append(out.logits[0].float())
    return torch.cat(parts)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("model_type", nightly_but(ARCHITECTURES_IN_SHORT, ARCHITECTURES))
def test_logits_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Of the native decoder or, for architectures that it does not support, of packed linear layers."""
    path = make_checkpoint(model_type, tmp_path)
    model = loaded(path)
    if isinstance(model.model, nn.Module):
        kinds = {type(module) for module in model.model.modules()}
        assert PackedLinear in kinds and nn.Linear not in kinds
    sequence = tokens(100)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence])).logits[0]
    result = logits(model, sequence)
    assert ((result - expected).norm() / expected.norm()).item() < 1e-4


def test_a_token_is_bitwise_independent_of_chunks_and_threads(llama: str) -> None:
    forward = loaded(llama)
    sequence = tokens(500)  # more than one chunk of rows per thread
    whole = logits(forward, sequence)
    assert torch.equal(logits(forward, sequence, chunk=7), whole)
    assert torch.equal(logits(forward, sequence, chunk=130), whole)
    torch.set_num_threads(2)
    assert torch.equal(logits(forward, sequence), whole)
    assert torch.equal(logits(forward, sequence, chunk=60), whole)


def test_logits_of_selected_tokens(llama: str) -> None:
    forward = loaded(llama)
    sequence = tokens(300)
    whole = logits(forward, sequence)
    assert torch.equal(logits(forward, sequence, keep=torch.tensor([299, 0, 17])), whole[[299, 0, 17]])
    assert torch.equal(logits(forward, sequence, keep=2), whole[-2:])
    assert logits(forward, sequence, keep=torch.empty(0, dtype=torch.int64)).shape == (0, VOCAB)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_precise_as_transformers(llama: str, dtype: str) -> None:
    sequence = tokens(200, seed=3)
    models = {
        kind: AutoModelForCausalLM.from_pretrained(llama, dtype=kind, attn_implementation="eager").eval()
        for kind in (torch.float32, getattr(torch, dtype))
    }
    with torch.inference_mode():
        exact, theirs = (model(torch.tensor([sequence])).logits[0].float() for model in models.values())
    ours = logits(loaded(llama, dtype=dtype), sequence)
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


def test_biases_and_scaled_rotation(tmp_path: Path) -> None:
    changes = dict(
        attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)
    )
    path = make_checkpoint("llama", tmp_path, **changes)
    forward = loaded(path)
    assert isinstance(forward.model, NativeDecoder)
    sequence = tokens(50)
    plain = logits(loaded(path, native_forward=False), sequence)
    assert ((logits(forward, sequence) - plain).norm() / plain.norm()).item() < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("int4", 0.4)])
def test_codes_change_logits_a_little(model_type: str, quantization: str, most: float, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path)
    plain, quantized = loaded(path), loaded(path, quantization=quantization)
    assert type(plain.model) is type(quantized.model)
    sequence = tokens(60)
    expected, result = logits(plain, sequence), logits(quantized, sequence)
    assert 1e-3 < ((result - expected).norm() / expected.norm()).item() < most
    if isinstance(quantized.model, NativeDecoder):
        assert torch.equal(logits(quantized, sequence, chunk=7), result)


def test_int8_keys_and_values_in_the_native_decoder(llama: str) -> None:
    forward = loaded(llama, kv_cache_dtype="int8")
    assert isinstance(forward.model, NativeDecoder)
    sequence = tokens(60)
    plain = logits(loaded(llama, kv_cache_dtype="int8", native_forward=False), sequence)
    assert ((logits(forward, sequence) - plain).norm() / plain.norm()).item() < 1e-2


def test_int8_weights_that_change_logits_too_much_are_rejected(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="requires a CPU and native_forward"):
        loaded(llama, quantization="int8", native_forward=False)
    monkeypatch.setattr(Int8, "tolerance", 1e-4)
    with pytest.raises(
        LoadError, match=r'quantization="int8" is not supported: LlamaForCausalLM computes other logits'
    ):
        loaded(llama, quantization="int8")


def test_native_forward_can_be_disabled(llama: str) -> None:
    forward = loaded(llama, native_forward=False).model
    assert isinstance(forward, nn.Module)
    assert PackedLinear not in {type(module) for module in forward.modules()}


def test_a_rotation_that_depends_on_the_length_runs_through_transformers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0))
    assert isinstance(loaded(path).model, NativeDecoder)  # within the model's positions it does not
    assert not isinstance(loaded(path, max_model_len=POSITIONS + 2).model, NativeDecoder)


def test_a_decoder_with_wrong_logits_is_undone(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(loaded(llama, native_forward=False), tokens(40))
    forward = native_decoder.native.forward
    monkeypatch.setattr(native_decoder.native, "forward", lambda *args: forward(*args) * 1.01)
    with caplog.at_level(logging.WARNING):
        model = loaded(llama)
    assert "LlamaForCausalLM runs through transformers: the native forward pass computes other logits" in caplog.text
    assert isinstance(model.model, nn.Module)
    result = logits(model, tokens(40))
    assert ((result - expected).norm() / expected.norm()).item() < 1e-5, "its weights are restored"


def test_packed_layers_with_wrong_logits_are_undone(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_decoder, "unavailable", lambda: "the CPU kernels are not compiled")
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_ones(*x.shape[:-1], self.out_features))
    with caplog.at_level(logging.INFO):
        model = loaded(llama).model
    assert "runs through transformers: the CPU kernels are not compiled" in caplog.text
    assert "runs on torch's linear layers" in caplog.text
    assert PackedLinear not in {type(module) for module in model.modules()}
