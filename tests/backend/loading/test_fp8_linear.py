"""`quantization: "fp8"`: the linear layer, torch's rules for it on a card, and whole models by its twin."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from card_rig import card_core, functions_as_kernels
from checkpoints import ARCHITECTURES, make_checkpoint
from emulated_card import emulated_card
from fp8_twins import fp8_twins
from nightly import ARCHITECTURES_IN_SHORT, nightly_but
from offline import make_core, run, tokens
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from inflight.attention.reference import ReferenceAttention
from inflight.config import ConfigError, EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.checkpoint import weights
from inflight.loading.forward.fused_decoder import fuse_modules
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization import fp8_linear, fp8_product
from inflight.loading.quantization.fp8_linear import Fp8Linear, decoder_linears, product, quantize_linears
from inflight.loading.quantization.in_float32 import InFloat32
from inflight.ops.base import QuantizedRows
from inflight.ops.reference_ops import ReferenceOps

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
OPS = ReferenceOps()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """As if this CPU had fp8 products: the twin computes them."""
    with fp8_twins():
        yield


def plain_linear(inputs: int = 64, outputs: int = 48, dtype: torch.dtype = torch.float32, bias: bool = True) -> Any:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    linear.weight[3] = 0
    linear.weight[5] *= 1000
    return linear


def config(path: str, **options: Any) -> EngineConfig:
    common = {"model": path, "device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "native_forward": False}
    return EngineConfig.from_dict({**common, "quantization": "fp8", **options})


class TestLayer:
    def test_it_computes_with_rounded_weights_and_inputs(self) -> None:
        linear = plain_linear()
        x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
        made = Fp8Linear.quantized(linear, CPU, OPS)
        assert made.weight.dtype == E4M3
        assert made.weight_scale.tolist() == pytest.approx(
            (linear.weight.abs().amax(1) / 448).clamp_min(1e-12).tolist()
        )
        weight = made.weight.double() * made.weight_scale.double()[:, None]
        row_scale = x.abs().amax(1, keepdim=True) / 448
        rows = (x / row_scale).to(E4M3).double() * row_scale.double()
        torch.testing.assert_close(made(x).double(), rows @ weight.T + linear.bias.double(), rtol=1e-5, atol=1e-5)
        per_channel = (made(x) - linear(x)).norm(dim=0) / linear(x).norm(dim=0)
        assert per_channel.max() < 0.1, "large channels cost small ones nothing"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_results_have_the_models_dtype(self, dtype: torch.dtype) -> None:
        linear = plain_linear(dtype=dtype)
        x = torch.randn(2, 5, 64).to(dtype)
        out = Fp8Linear.quantized(linear, CPU, OPS)(x)
        assert out.dtype == dtype
        assert out.shape == (2, 5, 48)
        assert (out.float() - linear(x).float()).norm() < 0.06 * linear(x).float().norm()

    def test_quantised_rows_and_strided_inputs_are_the_same(self) -> None:
        made = Fp8Linear.quantized(plain_linear(), CPU, OPS)
        wide = torch.randn(6, 128)
        x = wide[:, 64:]
        assert torch.equal(made(x), made(x.contiguous()))
        assert torch.equal(made(x), made(OPS.quantize_rows(x)))
        assert torch.equal(made(x[None]), made(x)[None])
        assert made(x[:0]).shape == (0, 48)

    def test_wider_inputs_are_not_rounded(self) -> None:
        made = Fp8Linear.quantized(plain_linear(dtype=torch.bfloat16), CPU, OPS)
        x = torch.randn(3, 64)
        weight = made.weight.float() * made.weight_scale[:, None]
        with InFloat32():
            out = made(x)
        torch.testing.assert_close(out, x @ weight.T + made.bias.float())

    @pytest.mark.parametrize("bias", [True, False])
    def test_merged_layers_share_their_memory(self, bias: bool) -> None:
        parts = [Fp8Linear.quantized(plain_linear(outputs=n, bias=bias), CPU, OPS) for n in (32, 16, 48)]
        x = torch.randn(5, 64)
        before = torch.cat([part(x) for part in parts], dim=-1)
        whole = Fp8Linear.merged(parts)
        torch.testing.assert_close(whole(x), before)
        torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), before)
        assert {part.weight.untyped_storage().data_ptr() for part in parts} == {
            whole.weight.untyped_storage().data_ptr()
        }
        assert whole.out_features == 96
        assert (whole.bias is None) != bias

    def test_layers_that_differ_are_not_merged(self) -> None:
        parts = [Fp8Linear.quantized(plain_linear(bias=bias), CPU, OPS) for bias in (True, False)]
        with pytest.raises(ValueError, match="whether they have a bias"):
            Fp8Linear.merged(parts)


class TestOnACard:
    """The meta device applies torch's rules for layouts, shapes and dtypes on a card."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tokens", [0, 1, 17, 8192])
    def test_the_product_follows_the_rules_of_scaled_mm(self, tokens: int, dtype: torch.dtype) -> None:
        weights, more = torch.empty(4096, 14336, dtype=E4M3, device="meta"), torch.empty(16, 14336, dtype=E4M3)
        parts = [Fp8Linear(w.to("meta"), torch.empty(len(w), device="meta"), None, dtype, OPS) for w in (weights, more)]
        rows = QuantizedRows(torch.empty(tokens, 14336, dtype=E4M3, device="meta"), torch.empty(tokens, device="meta"))
        for layer in (*parts, Fp8Linear.merged(parts)):
            out = layer(rows)
            assert out.shape == (tokens, layer.out_features)
            assert out.dtype == dtype

    @pytest.mark.parametrize("size", [(24, 64), (64, 24)])
    def test_other_sizes_are_against_the_rules(self, size: tuple[int, int]) -> None:
        outputs, inputs = size
        assert not fp8_linear.fits(nn.Linear(inputs, outputs))
        rows = QuantizedRows(torch.empty(3, inputs, dtype=E4M3, device="meta"), torch.empty(3, device="meta"))
        with pytest.raises(RuntimeError, match="divisible by 16"):
            product(rows, torch.empty(size, dtype=E4M3, device="meta"), torch.empty(outputs, device="meta"), None, E4M3)

    @pytest.mark.parametrize(
        ("capability", "dtype", "reason"),
        [
            ((8, 0), torch.bfloat16, "compute capability 8.9 or later, and this one has 8.0"),
            ((8, 9), torch.bfloat16, None),
            ((10, 0), torch.float16, None),
            ((9, 0), torch.float32, "dtype bfloat16 or float16, and the model's is float32"),
        ],
    )
    def test_which_cards_and_dtypes_have_it(
        self, capability: Any, dtype: torch.dtype, reason: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        found = fp8_linear.unsupported(torch.device("cuda"), dtype)
        assert found is None if reason is None else reason in str(found)


ATTENTION = "self_attn.k_proj self_attn.o_proj self_attn.q_proj self_attn.v_proj"
# of the first decoder layer
IN_FP8 = {
    "llama": f"mlp.down_proj mlp.gate_proj mlp.up_proj {ATTENTION}",
    "phi3": "mlp.down_proj mlp.gate_up_proj self_attn.o_proj self_attn.qkv_proj",
    "qwen3_moe": ATTENTION,
    "gpt_oss": ATTENTION,
    "opt": "fc1 fc2 self_attn.k_proj self_attn.out_proj self_attn.q_proj self_attn.v_proj",
    "gpt2": "",
}


class TestWhichLayers:
    @pytest.mark.parametrize("model_type", IN_FP8)
    def test_those_of_decoder_layers_without_routers(self, model_type: str, tmp_path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(make_checkpoint(model_type, tmp_path))
        names = decoder_linears(model, model.config)
        first = sorted(name.split(".0.", 1)[1] for name in names if ".layers.0." in name)
        assert " ".join(first) == IN_FP8[model_type]
        assert len(names) == 2 * len(first)

    def test_a_router_that_is_a_linear_layer_stays(self) -> None:
        class TopRouter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.choose = nn.Linear(16, 16)

        layers = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(16, 16), "up": nn.Linear(16, 16), "r": TopRouter()})])
        model = nn.ModuleDict({"layers": layers, "head": nn.Linear(16, 16)})
        one_layer = AutoConfig.for_model("llama", num_hidden_layers=1)
        assert list(decoder_linears(model, one_layer)) == ["layers.0.up"]

    def test_a_model_without_any_is_refused_by_name(self, on_cpu: None, tmp_path: Path) -> None:
        with pytest.raises(LoadError, match="GPT2LMHeadModel has no linear layer in its decoder layers"):
            load(config(make_checkpoint("gpt2", tmp_path)))

    def test_layers_of_other_sizes_stay(self, on_cpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = make_checkpoint("llama", tmp_path, intermediate_size=40)
        with caplog.at_level(logging.INFO):
            model = load(config(path)).model
        assert "8 linear layers of LlamaForCausalLM are in fp8" in caplog.text
        kinds = {name: type(module) for name, module in model.named_modules() if name.endswith("_proj")}
        assert {name.rpartition(".")[2] for name, kind in kinds.items() if kind is nn.Linear} == {
            "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip


class TestLoading:
    def test_the_device_never_holds_the_plain_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights come from the host one by one."""
        sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", vocab_size=99, num_key_value_heads=4, tie_word_embeddings=True, **sizes),
            dtype=torch.bfloat16,
        )
        plain = sum(linear.weight.nbytes for linear in decoder_linears(model, model.config).values())
        one = 512 * 256
        monkeypatch.setattr(fp8_linear, "select_ops", lambda device: ReferenceOps())
        with emulated_card():
            quantize_linears(model, model.config, torch.device("cuda"), verify=False)
            peak = torch.cuda.max_memory_allocated()
            assert plain / 2 < peak < plain / 2 + 12 * one, "e4m3, and one layer in float32 twice"
            assert torch.cuda.memory_allocated() < 1.05 * plain / 2

    def test_a_wrong_product_is_found(self, on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = make_checkpoint("llama", tmp_path)
        monkeypatch.setattr(fp8_linear, "product", lambda *args: product(*args) * 1.2)
        with pytest.raises(LoadError, match=r"the product of model.layers.0.self_attn.q_proj \[32, 32\] differs by 20"):
            load(config(path))
        load(config(path, check_on_load=False))

    def test_a_card_without_row_wise_products_for_some_sizes_serves_them_otherwise(
        self, on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Merged layers have other sizes than the loaded ones, and are tried, too."""

        def fail(x: QuantizedRows, weight: Tensor, *rest: Any) -> Tensor:
            if len(x.values) == 1 or len(weight) == 96:  # gate and up, once they are merged
                raise RuntimeError("Invalid scaling configuration.")
            return product(x, weight, *rest)

        path = make_checkpoint("llama", tmp_path)
        expected = load(config(path)).model
        monkeypatch.setattr(fp8_linear, "product", fail)
        fp8_product._warn_once.cache_clear()
        model = load(config(path)).model
        assert fuse_modules(model, OPS, 64) is not None
        warned = {line.split(" use ")[0]: line for line in caplog.messages if "row-wise scales fail" in line}
        assert "at least 16 rows" in warned["fp8 layers of size [32, 48]"]
        assert "applied afterwards" in warned["fp8 layers of size [96, 32]"]
        x = torch.randn(3, 32)
        gated, same_gated = (one.model.layers[1].mlp(x[None])[0] for one in (model, expected))
        torch.testing.assert_close(gated, same_gated, rtol=0.05, atol=1e-3)

    def test_a_slightly_wrong_forward_pass_is_found(
        self, on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The check in float32 multiplies by what the weights mean, and rounds no inputs."""
        attend = ReferenceAttention.attend
        monkeypatch.setattr(ReferenceAttention, "attend", lambda *args: attend(*args) * 1.01)
        options = dict(attention_backend="reference", dtype="bfloat16")
        with pytest.raises(LoadError, match="in float32 the logits of a test batch differ by 0"):
            load(config(make_checkpoint("llama", tmp_path), **options))

    @pytest.mark.parametrize("quantised", [True, False])
    def test_what_fits_only_in_eight_bits_is_loaded(
        self, quantised: bool, on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = make_checkpoint("llama", tmp_path)
        count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters())
        monkeypatch.setattr(weights, "available_memory", lambda device: int(count * 2.7))
        if quantised:
            load(config(path))
        else:
            with pytest.raises(LoadError, match=r"the weights of .* take .* as float32"):
                load(config(path, quantization=None))

    def test_a_cpu_refuses_it_and_names_the_way_out(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match='"fp8" cannot be used: it needs a GPU, and the device is cpu; set it to "int8"'
        ):
            load(config(make_checkpoint("llama", tmp_path)))


PROMPTS = [[7, 3, 9, 100, 5] * 12, [1, 2, 3], [50] * 33, [7, 3, 9, 100, 5] * 8]


@pytest.mark.parametrize("model_type", nightly_but(["llama"], ["llama", "qwen3_moe", "gemma2"]))
def test_a_whole_engine_by_the_twin(model_type: str, on_cpu: None, tmp_path: Path) -> None:
    """Any batch and chunks, preemption, n > 1: the same tokens, and hardly those of the plain weights."""
    path = make_checkpoint(model_type, tmp_path)
    params = [SamplingParams(max_tokens=16, temperature=0.8, n=n, seed=n, ignore_eos=True) for n in (1, 2, 3, 1)]
    outputs = []
    for options in (
        dict(max_num_seqs=1),
        dict(max_num_batched_tokens=24, max_num_seqs=3),
        dict(block_size=7, num_gpu_blocks_override=40, max_model_len=128),
    ):
        core = make_core(path, quantization="fp8", **options)
        deltas = run(core, PROMPTS, params)
        outputs.append({key: tokens(value) for key, value in deltas.items()})
    assert outputs[0] == outputs[1] == outputs[2]
    plain = run(make_core(path), PROMPTS, params)
    assert outputs[0] != {key: tokens(value) for key, value in plain.items()}


@pytest.mark.parametrize("model_type", nightly_but(ARCHITECTURES_IN_SHORT, ARCHITECTURES))
def test_every_architecture_passes_the_check_at_load(model_type: str, on_cpu: None, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path)
    if model_type == "gpt2":
        return  # see above
    loaded = load(config(path, dtype="bfloat16"))
    assert any(isinstance(module, Fp8Linear) for module in loaded.model.modules())


def test_captured_steps_are_the_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode graphs and launch-ahead, on merged layers whose inputs norms and gate quantise."""
    path = make_checkpoint("llama", tmp_path)
    functions_as_kernels(monkeypatch)
    params = [SamplingParams(max_tokens=12, temperature=0.7, n=n, seed=n, ignore_eos=True) for n in (1, 2, 1, 1)]
    outputs, captured = [], []
    with emulated_card():
        for eager in (False, True):
            options = dict(max_num_seqs=4, max_model_len=128, dtype="bfloat16", enforce_eager=eager)
            core: Any = card_core(path, quantization="fp8", **options)
            outputs.append({key: tokens(deltas) for key, deltas in run(core, PROMPTS, params).items()})
            captured.append(bool(core.runner.graphs))
    assert captured == [True, False]
    assert outputs[0] == outputs[1]
