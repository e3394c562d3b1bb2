"""The parts of each architecture that are recognised, on a CPU and on a GPU, and how other modules differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, POSITIONS, make_checkpoint
from nightly import nightly_but
from torch import nn

from inflight.config import EngineConfig
from inflight.kernels.cpu import library
from inflight.loading.forward.fused_decoder import fuse_modules
from inflight.loading.forward.native_decoder import NativeDecoder, native_decoder
from inflight.loading.loader import LoadedModel, load
from inflight.loading.recognise.modules import (
    NotRecognised,
    attention,
    check,
    decoder_layer,
    gated_mlp,
    rms_norm,
    rotary,
)
from inflight.ops.reference_ops import ReferenceOps

needs_library = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


def whole(name: str, norms: int = 5) -> dict[str, int]:
    """Two decoder layers with all their parts, and the final norm."""
    return {f"{name}Attention": 2, f"{name}DecoderLayer": 2, f"{name}MLP": 2, f"{name}RMSNorm": norms}


# model type -> why it is not a native decoder (None: it is one), and the modules that fused operations compute.
RECOGNISED: dict[str, tuple[str | None, dict[str, int]]] = {
    "llama": (None, whole("Llama")),
    "qwen2": (None, whole("Qwen2")),
    "qwen3": (None, whole("Qwen3", norms=9)),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock has experts, gate", {"Qwen3MoeAttention": 2, "Qwen3MoeRMSNorm": 9}),
    "mistral": (None, whole("Mistral")),
    "mixtral": ("MixtralSparseMoeBlock has experts, gate", {"MixtralAttention": 2, "MixtralRMSNorm": 5}),
    "gemma2": ("Gemma2DecoderLayer has .*post_feedforward_layernorm", {"Gemma2Attention": 2}),
    "gemma3_text": ("Gemma3DecoderLayer has .*post_feedforward_layernorm", {}),
    "phi": ("PhiModel has embed_tokens, final_layernorm", {}),
    "phi3": (None, whole("Phi3")),
    "gpt2": ("GPT2LMHeadModel has lm_head, transformer", {}),
    "opt": ("OPTModel has decoder", {}),
    "olmo2": ("Olmo2DecoderLayer has .*post_feedforward_layernorm", {"Olmo2MLP": 2, "Olmo2RMSNorm": 9}),
    "granite": (None, whole("Granite")),
    "starcoder2": ("LayerNorm is not an RMS norm", {"Starcoder2Attention": 2}),
    "cohere": ("CohereDecoderLayer has input_layernorm, mlp, self_attn, not", {"CohereMLP": 2}),
    "smollm3": (None, whole("SmolLM3")),
    "llama4_text": ("Llama4TextDecoderLayer has feed_forward", {"Llama4TextMLP": 2, "Llama4TextRMSNorm": 5}),
    "afmoe": ("AfmoeDecoderLayer has .*pre_mlp_layernorm", {"AfmoeMLP": 2, "AfmoeRMSNorm": 13}),
    "jetmoe": ("JetMoeDecoderLayer has .*self_attention", {"JetMoeRMSNorm": 5}),
    "phimoe": ("LayerNorm is not an RMS norm", {"PhimoeAttention": 2}),
    "gpt_oss": ("GptOssAttention has sinks", {"GptOssRMSNorm": 5}),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def unaccelerated(model_type: str, folder: Path, **options: Any) -> LoadedModel:
    """With attention attached, and transformers' modules as they are."""
    path = make_checkpoint(model_type, folder, **options.pop("changes", {}))
    values = dict(
        model=path, device="cpu", dtype="float32", kv_cache_memory="16MiB", native_forward=False, check_on_load=False
    )
    return load(EngineConfig.from_dict(values | options))


def test_every_architecture_is_listed() -> None:
    assert set(RECOGNISED) == set(ARCHITECTURES)


@needs_library
@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_as_a_native_decoder(model_type: str, dtype: str, tmp_path: Path) -> None:
    result = native_decoder(unaccelerated(model_type, tmp_path, dtype=dtype).model)
    reason, _ = RECOGNISED[model_type]
    if reason is None:
        assert isinstance(result, tuple) and isinstance(result[0], NativeDecoder)
    else:
        assert isinstance(result, str)
        with pytest.raises(NotRecognised, match=reason):
            raise NotRecognised(result)


@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_as_modules_with_fused_operations(model_type: str, dtype: str, tmp_path: Path) -> None:
    model = unaccelerated(model_type, tmp_path, dtype=dtype).model
    fuse_modules(model, ReferenceOps(), 256)
    assert computed_by_fused_operations(model) == RECOGNISED[model_type][1]


def computed_by_fused_operations(model: nn.Module) -> dict[str, int]:
    """Classes of the modules whose forward is replaced, and of those within, without linear layers and activations."""
    found = {inner for module in model.modules() if "forward" in vars(module) for inner in module.modules()}
    parts = ("Attention", "DecoderLayer", "MLP", "RMSNorm")
    return dict(Counter(type(module).__name__ for module in found if type(module).__name__.endswith(parts)))


class TestWhatDiffersIsNamed:
    """Each change keeps the structure that the definition has, or departs from it in one place."""

    @pytest.fixture
    def layer(self, tmp_path: Path) -> Any:
        layer = unaccelerated("qwen3", tmp_path).model.model.layers[0]
        check(layer, decoder_layer(layer))
        return layer

    def test_a_norm_with_another_formula(self, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        norm = layer.input_layernorm
        monkeypatch.setattr(norm, "forward", lambda x: x * (1 + norm.weight))
        with pytest.raises(NotRecognised, match="Qwen3RMSNorm computes something else than RmsNorm"):
            rms_norm(norm)

    def test_another_activation(self, layer: Any) -> None:
        layer.mlp.act_fn = nn.GELU()
        with pytest.raises(NotRecognised, match="Qwen3MLP has another activation than SiLU"):
            gated_mlp(layer.mlp)

    def test_an_mlp_with_swapped_operands(self, layer: Any) -> None:
        mlp = layer.mlp
        part = gated_mlp(mlp)
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
        with pytest.raises(NotRecognised, match="Qwen3MLP computes something else than GatedMlp"):
            check(mlp, part)

    def test_layers_that_are_not_plain(self, layer: Any) -> None:
        layer.mlp.down_proj = type("Adapted", (nn.Linear,), {})(48, 32)
        with pytest.raises(NotRecognised, match="Adapted is not a plain linear layer"):
            gated_mlp(layer.mlp)

    def test_parameters_besides_the_childrens(self, layer: Any) -> None:
        layer.self_attn.bias = nn.Parameter(torch.zeros(3))
        with pytest.raises(NotRecognised, match="Qwen3Attention has parameters besides those of its children"):
            attention(layer.self_attn)

    def test_a_norm_of_one_of_query_and_key(self, layer: Any) -> None:
        layer.self_attn.k_norm = nn.Identity()
        with pytest.raises(NotRecognised, match="a norm for one of query and key only"):
            attention(layer.self_attn)

    def test_no_paged_attention(self, layer: Any) -> None:
        del layer.self_attn.inflight
        with pytest.raises(NotRecognised, match="Qwen3Attention has no paged attention"):
            decoder_layer(layer)

    def test_another_order(self, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The parts are the same; the MLP runs in parallel with attention, not after it."""
        part = decoder_layer(layer)

        def parallel(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            normed = layer.input_layernorm(hidden_states)
            return hidden_states + layer.self_attn(normed, **kwargs)[0] + layer.mlp(normed)

        monkeypatch.setattr(layer, "forward", parallel)
        with pytest.raises(NotRecognised, match="Qwen3DecoderLayer computes something else than DecoderLayer"):
            check(layer, part)

    def test_other_arguments(self, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        part = attention(layer.self_attn)
        monkeypatch.setattr(layer.self_attn, "forward", lambda x, alibi: (x, None))
        with pytest.raises(NotRecognised, match="Qwen3Attention cannot be called as Attention"):
            check(layer.self_attn, part)


def test_a_check_leaves_the_attention_backend_in_place(tmp_path: Path) -> None:
    loaded = unaccelerated("llama", tmp_path)
    layer = loaded.model.model.layers[0].self_attn
    check(layer, attention(layer))
    assert layer.inflight.backend is loaded.backend


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_rotary_embeddings(rope_type: str, tmp_path: Path) -> None:
    options = dict(rope_type=rope_type, rope_theta=1e4)
    if rope_type != "default":
        options |= dict(factor=4.0, original_max_position_embeddings=64)
    if rope_type == "llama3":
        options |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    module = unaccelerated("llama", tmp_path, changes=dict(rope_parameters=options)).model.model.rotary_emb
    assert rotary(module).inverse_frequencies.shape == (4,)
    module.attention_scaling, module.forward = 1.0, lambda x, positions: (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    with pytest.raises(NotRecognised, match="computes other angles"):
        rotary(module)


def test_a_rotary_embedding_that_depends_on_the_length(tmp_path: Path) -> None:
    changes = dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))
    within, beyond = (
        unaccelerated("llama", tmp_path, changes=changes, max_model_len=length).model.model.rotary_emb
        for length in (POSITIONS, POSITIONS + 2)
    )
    assert torch.equal(rotary(within).inverse_frequencies, within.original_inv_freq)
    with pytest.raises(NotRecognised, match="a rotary embedding of type chosen for each request"):
        rotary(beyond)


@needs_library
def test_only_the_native_decoder_applies_a_residual_multiplier(tmp_path: Path) -> None:
    loaded = unaccelerated("granite", tmp_path)
    assert decoder_layer(loaded.model.model.layers[0]).residual_factor == 0.5


@needs_library
def test_the_native_decoder_requires_equal_norms_and_the_cpu_kernel(tmp_path: Path) -> None:
    model = unaccelerated("llama", tmp_path).model
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1
    assert native_decoder(model) == "its norms differ in eps"
    assert "requires attention_backend='cpu', not 'reference'" in str(
        native_decoder(unaccelerated("llama", tmp_path, attention_backend="reference").model)
    )
