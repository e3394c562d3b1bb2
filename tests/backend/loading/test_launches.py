"""A decode step on the meta device: what it launches, by name and in order; it reads and copies nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fp8_twins import fp8_twins
from launches import Launches, to_meta

pytest.importorskip("triton")

from inflight.attention.base import AttentionMetadata, forward_context
from inflight.config import EngineConfig
from inflight.kernels.gpu import gpu_split_k
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu.launch import interpreted
from inflight.loading.forward import split_k
from inflight.loading.forward.fused_decoder import FusedDecoder, fuse_modules
from inflight.loading.loader import load
from inflight.loading.quantization import fp8_linear

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here")

META = torch.device("meta")
REQUESTS, TOKENS, BLOCK_SIZE = 3, 30_000, 16  # so few and long that keys are split: the second pass is counted


def layer(product: str = "aten.mm", first: bool = False) -> list[str]:
    """At most ten launches; `product` is that of query, key and value."""
    return [
        "rms_norm_kernel" if first else "add_rms_norm_kernel",
        product,
        "rotate_and_write_kernel",
        "attend_kernel",
        "reduce_kernel",
        "aten.mm",
        "add_rms_norm_kernel",
        "aten.mm",
        "silu_and_mul_kernel",
        "aten.mm",
    ]


BEFORE = ["plan_kernel", "aten.embedding"]  # how keys are split, once for all layers of a kind
AFTER = ["add_rms_norm_kernel", "aten.index", "aten.mm"]
# model type -> differences: operations before the layers and behind them, product of query, key and value.
MODELS: dict[str, tuple[list[str], list[str], str]] = {
    "llama": ([], [], "aten.mm"),
    "qwen2": ([], [], "aten.addmm"),
    "qwen3": ([], [], "aten.mm"),
    "mistral": ([], [], "aten.mm"),
    "phi3": ([], [], "aten.mm"),
    "smollm3": ([], [], "aten.mm"),
    "granite": (["aten.mul"], ["aten.div"], "aten.mm"),
}


def fp8_layer(first: bool = False) -> list[str]:
    """One launch more: attention's output is quantized by itself."""
    names = ["aten._scaled_mm" if name == "aten.mm" else name for name in layer(first=first)]
    names[names.index("silu_and_mul_kernel")] = "silu_and_mul_quantized_kernel"
    return [*names[:5], "quantize_rows_kernel", *names[5:]]


def on_meta(model_type: str, folder: Path, **config_changes: Any) -> tuple[Any, GpuAttention]:
    """A model with fused operations, recognised on a CPU and moved to the meta device with its pool."""
    changes: dict[str, Any] = dict(num_hidden_layers=3, sliding_window=None)  # keys within a window are not split
    if model_type == "qwen2":
        changes["use_sliding_window"] = False
    if model_type == "granite":
        changes["embedding_multiplier"] = 3.0
    path = make_checkpoint(model_type, folder, **changes)
    config = dict(model=path, device="cpu", dtype="bfloat16", **config_changes)
    options = dict(native_forward=False, attention_backend="gpu", kv_cache_memory="1MiB", check_on_load=False)
    model = load(EngineConfig.from_dict({**config, **options})).model
    assert fuse_modules(model, GpuOps(), 256) is not None
    forward = model.model.forward
    assert isinstance(forward, FusedDecoder)
    model.to(META)
    forward.table = to_meta(forward.table)
    to_meta(forward.decoder)
    backend = GpuAttention()
    for part in forward.decoder.layers:
        attached = part.attention.layer
        attached.backend = backend
        attached.cache = backend.new_cache(4, BLOCK_SIZE, attached.spec, torch.bfloat16, META)
    return model, backend


def decode_step(count: int) -> AttentionMetadata:
    """`count` requests compute a token each."""
    blocks = -(-TOKENS // BLOCK_SIZE)
    return AttentionMetadata(
        query_start_loc=torch.empty(count + 1, dtype=torch.int32, device=META),
        seq_lens=torch.empty(count, dtype=torch.int32, device=META),
        block_table=torch.empty(count, blocks, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(count, dtype=torch.int64, device=META),
        query_start_loc_cpu=list(range(count + 1)),
        seq_lens_cpu=[TOKENS] * count,
        max_query_len=1,
        max_seq_len=TOKENS,
        block_size=BLOCK_SIZE,
    )


def launched(model: Any, backend: GpuAttention, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By a decode step."""
    launches = Launches(monkeypatch)
    ids, positions = torch.empty(2, 1, REQUESTS, dtype=torch.int64, device=META)
    keep = torch.empty(REQUESTS, dtype=torch.int64, device=META)
    with torch.no_grad(), forward_context(decode_step(REQUESTS), backend), launches:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep).logits
    assert logits.shape == (1, REQUESTS, model.config.vocab_size)
    return launches.names


@pytest.mark.parametrize("model_type", MODELS)
def test_a_decode_step_launches_ten_kernels_a_layer(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = on_meta(model_type, tmp_path)
    names = launched(model, backend, monkeypatch)
    before, behind, product = MODELS[model_type]
    layers = [name for index in range(3) for name in layer(product, first=index == 0)]
    assert names == [*BEFORE, *before, *layers, *AFTER, *behind]


@pytest.mark.usefixtures("gpu_rounding")  # recognition compares what is quantized
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_with_layers_in_fp8_eleven(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = GpuOps()
    monkeypatch.setattr(fp8_linear, "select_ops", lambda device: ops)  # of the layers themselves
    with fp8_twins():
        model, backend = on_meta(model_type, tmp_path, quantization="fp8")
    for part in model.model.forward.decoder.layers:
        for projection in (part.attention.qkv, part.mlp.gate_up):
            assert projection.fp8 is not None
            projection.fp8.to(META)
    names = launched(model, backend, monkeypatch)
    layers = [name for index in range(3) for name in fp8_layer(first=index == 0)]
    assert names == [*BEFORE, *layers, *AFTER]
    assert len(fp8_layer()) == 11


def test_with_split_k_output_and_down_are_one_launch_each_of_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_BLOCK_N": 16, "_BLOCK_K": 16, "_MIN_STEPS": 1}.items():  # a tiny model's layers are split
        monkeypatch.setattr(gpu_split_k, name, value)
    monkeypatch.setattr(split_k, "_wrong", lambda *_: None)  # nothing is computed here
    model, backend = on_meta("llama", tmp_path)
    assert split_k.split_linears(model) is not None
    names = launched(model, backend, monkeypatch)
    layers = [name for index in range(3) for name in layer("aten.mm", first=index == 0)]
    for index in range(3):
        layers[10 * index + 5] = layers[10 * index + 9] = "split_k_kernel"
    assert names == [*BEFORE, *layers, *AFTER]


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views and allocations cost nothing; a number that the host reads is an error."""
    x = torch.empty(4, 6, device=META)
    with torch.no_grad(), Launches(monkeypatch) as launches:
        torch.nn.functional.linear(x[:2].view(1, 2, 6), x).flatten()
        x[:2].reshape(-1)
        x.T.reshape(-1)
        for read in (x.sum().item, x.tolist, x.nonzero, x.cpu):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()
    assert launches.names[:3] == ["aten.mm", "aten.clone", "aten.sum"]
