"""The check at load: what it compares, how closely, and what it cannot miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from nightly import nightly_but
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from inflight.attention.reference import ReferenceAttention
from inflight.config import EngineConfig
from inflight.loading.check.cases import Case, cases, position_limits, that_fit
from inflight.loading.check.load_check import EXACT, Reference, reference, tolerance
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.quantization.in_float32 import InFloat32, can_run_in_float32

CPU = torch.device("cpu")


def load_config(path: str, **options: Any) -> EngineConfig:
    values = {"model": path, "device": "cpu", "dtype": "bfloat16", "kv_cache_memory": "8MiB"}
    return EngineConfig.from_dict(values | options)


def lengths(found: list[Case]) -> list[tuple[int, int]]:
    return [(len(case.token_ids), case.first_position) for case in found]


class TestCases:
    def test_a_short_and_a_far_sequence_and_one_across_each_limit(self) -> None:
        assert lengths(cases(99, 1000, [], None, 0)) == [(7, 0), (12, 987)]
        assert lengths(cases(99, 1000, [64, 995, 5000], None, 0)) == [(7, 0), (12, 987), (12, 58)]
        assert lengths(cases(99, 2, [64], None, 0)) == [(1, 0), (1, 0)]

    def test_past_a_window_if_that_is_cheap(self) -> None:
        assert lengths(cases(99, 1000, [], 128, 512)) == [(7, 0), (140, 859)]
        assert lengths(cases(99, 1000, [], 128, 139)) == [(7, 0), (12, 987)]
        assert lengths(cases(99, 100, [], 128, 512)) == [(7, 0), (12, 87)]

    @pytest.mark.parametrize(
        ("num_blocks", "block_size", "fit"),
        [(64, 16, [7, 12, 12]), (2, 16, [7, 12]), (3, 8, [7, 12]), (2, 4, [7]), (1, 16, [7]), (1, 4, [4])],
    )
    def test_within_the_pool(self, num_blocks: int, block_size: int, fit: list[int]) -> None:
        found = that_fit(cases(99, 1000, [64], None, 0), num_blocks, block_size)
        assert [size for size, _ in lengths(found)] == fit
        assert sum(-(-size // block_size) for size in fit) <= num_blocks

    def test_every_length_that_config_json_names(self) -> None:
        rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=96, rope_theta=1e4)
        config = AutoConfig.for_model(
            "mistral", sliding_window=128, max_position_embeddings=4096, rope_parameters=rope, max_seq_len=2048
        )
        assert position_limits(config) == [96, 128, 2048, 4096]


def test_float32_without_a_copy_of_the_weights(tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", tmp_path)
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().float()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = exact(input_ids=ids, use_cache=False).logits
        with InFloat32():
            found = half(input_ids=ids, use_cache=False).logits
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-5)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert can_run_in_float32(half) and not can_run_in_float32(exact)
    half.register_buffer("codes", torch.zeros(2, dtype=torch.float8_e4m3fn))
    assert not can_run_in_float32(half)


def test_in_float32_no_table_is_widened_for_a_few_of_its_rows() -> None:
    """A vocabulary of 250,000 would take gigabytes."""
    table, rows = nn.Embedding(1000, 8).bfloat16(), torch.tensor([[3, 999]])
    experts, made = torch.randn(50, 8, 8, dtype=torch.float16), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.append(result.numel() if result.dtype == torch.float32 else 0)
            return result

    with torch.inference_mode(), Sizes(), InFloat32():
        found, expert = table(rows), experts[7]
    assert torch.equal(found, table.weight.float()[rows]) and torch.equal(expert, experts.float()[7])
    assert found.dtype == expert.dtype == torch.float32
    assert max(made) == 64


def test_in_half_precision_the_tolerance_is_a_few_times_transformers_own_error(tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="inflight").eval()
    found = reference(model, cases(199, 256, [], None, 0), CPU, widens=True)
    assert found.own_error is not None and 1e-4 < found.own_error < 0.05
    assert tolerance(found, None, 0.0) == pytest.approx(3 * found.own_error + 0.005)
    assert tolerance(Reference([], [], 0.0), None, 0.0) == EXACT
    assert tolerance(Reference([], [], 0.0), torch.int8, 0.0) == 0.1
    assert tolerance(Reference([], [], 0.01), None, 0.25) == 0.25


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_float32_refuses_half_precision_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A feature that costs 1% of the logits, far below the rounding that bfloat16 was once allowed."""
    path = make_checkpoint("llama", tmp_path)
    forward = modeling_llama.LlamaAttention.forward

    def with_a_state(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = forward(self, hidden_states, *args, **kwargs)
        return out + 0.02 * hidden_states.cumsum(dim=1) * (self.layer_idx == 1), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", with_a_state)
    with pytest.raises(LoadError, match=r"the logits of a test batch differ by .* so paged attention drops a feature"):
        load(load_config(path, dtype=dtype, native_forward=False))
    load(load_config(path, dtype=dtype, native_forward=False, check_on_load=False))


def test_a_kernel_with_a_small_error_is_refused_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("gpt2", tmp_path)

    class Blurred(ReferenceAttention):
        def attend(self, *args: Any) -> torch.Tensor:
            return super().attend(*args) * 1.1

    monkeypatch.setattr("inflight.loading.loader.select_attention", lambda *_: Blurred())
    with pytest.raises(LoadError, match=r"differ by \d+\.\d% \(tolerance: [1-4]\.\d%\) .* in float32 they agree"):
        load(load_config(path, attention_backend="reference"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_position_that_is_counted_across_requests_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """No limit is named anywhere: the far sequence changes what its neighbour gets."""
    path = make_checkpoint("gpt2", tmp_path)
    forward = modeling_gpt2.GPT2Model.forward

    def scaled(self: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = forward(self, input_ids=input_ids, position_ids=position_ids, **kwargs)
        if position_ids is not None and bool(position_ids.max() > 200):
            out.last_hidden_state = out.last_hidden_state * 1.2
        return out

    load(load_config(path, dtype=dtype))
    monkeypatch.setattr(modeling_gpt2.GPT2Model, "forward", lambda self, *args, **kwargs: scaled(self, *args, **kwargs))
    with pytest.raises(LoadError, match="the logits of a test batch differ"):
        load(load_config(path, dtype=dtype))


def test_eager_attention_that_fails_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("llama", tmp_path)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", broken)
    with pytest.raises(LoadError, match=r"transformers' eager attention, .* fails: RuntimeError: no such luck"):
        load(load_config(path))


@pytest.mark.parametrize("seed", nightly_but([2, 7], range(12)))
def test_an_expert_that_rounding_changes_is_no_reason_to_refuse(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("gpt_oss", tmp_path, seed=seed, num_hidden_layers=6)
    load(load_config(path))
    assert "compute other logits" not in caplog.text, "nor to slow it down"


@pytest.mark.parametrize("first_wrong_position", nightly_but([200], [0, 200]))
def test_a_kernel_with_an_error_is_refused_where_experts_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_wrong_position: int
) -> None:
    path = make_checkpoint("gpt_oss", tmp_path, seed=2, num_hidden_layers=6)
    forward = modeling_gpt_oss.GptOssModel.forward

    def blurred(self: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = forward(self, input_ids=input_ids, position_ids=position_ids, **kwargs)
        x = out.last_hidden_state
        if x.dtype == torch.bfloat16 and self.config._attn_implementation == "inflight":
            wrong = (position_ids >= first_wrong_position)[..., None]
            out.last_hidden_state = torch.where(wrong, x + 0.3 * x.roll(1, -1), x)
        return out

    monkeypatch.setattr(modeling_gpt_oss.GptOssModel, "forward", blurred)
    with pytest.raises(LoadError, match="'gpt_oss' is not supported"):
        load(load_config(path, native_forward=False))
