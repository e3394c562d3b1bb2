"""A whole decoder by `FusedOps`: when it is recognised, what it computes, and what of the model stays in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, greedy_reference, make_checkpoint
from nightly import ARCHITECTURES_IN_SHORT, nightly_but
from offline import make_core, run, tokens
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading import loader
from inflight.loading.forward import fused_decoder as fused_modules
from inflight.loading.forward.acceleration import use_ops
from inflight.loading.forward.fused_decoder import FusedDecoder, fuse_modules
from inflight.loading.loader import load
from inflight.loading.recognise.decoder import decoder_of
from inflight.loading.recognise.modules import NotRecognised
from inflight.ops.base import Angles
from inflight.ops.reference_ops import ReferenceOps

SHAPES = [(1, 20), (7, 12), (40, 6), (25, 16)]  # prompt, output tokens
WHOLE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "smollm3")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded with fused operations, by the reference."""
    ops = ReferenceOps()
    monkeypatch.setattr(
        loader, "accelerate", lambda model, _, passes, length, scheme, kernels: use_ops(model, ops, passes, length)
    )


def unaccelerated(model_type: str, folder: Path, **options: Any) -> Any:
    path = make_checkpoint(model_type, folder, **options.pop("changes", {}))
    values = dict(model=path, device="cpu", dtype="float32", kv_cache_memory="16MiB", native_forward=False)
    return load(EngineConfig.from_dict(values | options)).model


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("model_type", nightly_but(ARCHITECTURES_IN_SHORT, ARCHITECTURES))
def test_greedy_output_equals_generate(model_type: str, tmp_path: Path) -> None:
    """Chunks, mixes and decodes, with a preemption; float32."""
    path, rng = make_checkpoint(model_type, tmp_path), random.Random(model_type)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length, _ in SHAPES]
    counts = [count for _, count in SHAPES]
    options = dict(attention_backend="reference", block_size=4, num_gpu_blocks_override=64)
    core = make_core(path, max_num_batched_tokens=24, max_num_seqs=4, **options)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[i, 0]) for i in range(len(prompts))] == greedy_reference(path, prompts, counts)
    whole = isinstance(getattr(core.runner.model.get_decoder(), "forward", None), FusedDecoder)
    assert whole == (model_type in WHOLE)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_prompt_log_probabilities_leave_it_in_place(tmp_path: Path) -> None:
    """The head runs chunk by chunk, with the base model's output in place of its forward."""
    path = make_checkpoint("granite", tmp_path)  # divides its logits
    prompts, params = [list(range(40))], [SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=2)]
    core = make_core(path, attention_backend="reference")
    core.runner.forward.max_rows = 7
    entries = [entry for delta in run(core, prompts, params)[0, 0] for entry in delta.prompt_logprobs or ()]
    assert isinstance(core.runner.model.model.forward, FusedDecoder)
    plain = make_core(path, attention_backend="reference", native_forward=False)
    right = [entry for delta in run(plain, prompts, params)[0, 0] for entry in delta.prompt_logprobs or ()]
    assert [[token for token, *_ in entry] for entry in entries] == [[token for token, *_ in entry] for entry in right]
    values, expected = ([value for entry in of_one for _, value, _ in entry] for of_one in (entries, right))
    assert values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_the_table_of_angles_is_what_transformers_computes(
    rope_type: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_modules, "_TABLE_CHUNK", 100)
    rope = dict(rope_type=rope_type, rope_theta=1e4)
    if rope_type != "default":
        rope |= dict(factor=4.0, original_max_position_embeddings=64)
    if rope_type == "llama3":
        rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    model = unaccelerated("llama", tmp_path, dtype=dtype, changes=dict(rope_parameters=rope))
    fused = FusedDecoder(decoder_of(model), ReferenceOps(), 256)
    assert fused.table is not None
    positions = torch.tensor([[255, 0, 99, 100, 7, 7]])
    expected = model.model.rotary_emb(torch.zeros(1, dtype=getattr(torch, dtype)), positions)
    angles = Angles(*fused.table, expected[0].shape[-1], positions[0])
    assert angles.shared
    assert all(torch.equal(got, right[0]) for got, right in zip(angles.of_tokens(), expected))


def test_angles_chosen_for_each_request_are_transformers(tmp_path: Path) -> None:
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    model = unaccelerated("llama", tmp_path, max_model_len=300, changes=dict(rope_parameters=rope))
    assert fuse_modules(model, ReferenceOps(), 300) is not None
    fused = model.model.forward
    assert isinstance(fused, FusedDecoder)
    assert fused.table is None
    positions = torch.tensor([[3, 299, 9]])
    angles, expected = fused._angles(torch.zeros(3, 32), positions), model.model.rotary_emb(torch.zeros(1), positions)
    assert all(torch.equal(got, right[0]) for got, right in zip(angles.of_tokens(), expected))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_within_short_lengths_the_table_has_the_angles_of_short_sequences(rope_type: str, tmp_path: Path) -> None:
    """A module that chooses by the largest position is called with short ones alone."""
    rope: dict[str, Any] = dict(rope_type=rope_type, factor=2.0, rope_theta=1e4)
    if rope_type == "longrope":
        rope |= dict(short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64)
    limit = 64 if rope_type == "longrope" else 256
    model = unaccelerated("llama", tmp_path, max_model_len=limit, changes=dict(rope_parameters=rope))
    fused = FusedDecoder(decoder_of(model), ReferenceOps(), limit)
    assert fused.table is not None
    short = torch.arange(limit)[None]
    expected = model.model.rotary_emb(torch.zeros(1), short)
    got = Angles(*fused.table, expected[0].shape[-1], short[0]).of_tokens()
    assert all(torch.equal(mine, right[0]) for mine, right in zip(got, expected))


@pytest.mark.parametrize("num_positions", [1, 2, 101])
def test_a_table_of_any_length(num_positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_modules, "_TABLE_CHUNK", 100)
    fused = FusedDecoder(decoder_of(unaccelerated("llama", tmp_path)), ReferenceOps(), num_positions)
    assert fused.table is not None
    assert [table.shape for table in fused.table] == [(num_positions, 4)] * 2


def uneven(angles: Tensor) -> Tensor:
    return angles.cumsum(-1)


def test_halves_that_turn_by_other_angles_have_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unaccelerated("llama", tmp_path)
    monkeypatch.setattr(fused_modules, "rotary", lambda module: None)
    embedding = model.model.rotary_emb
    compute = embedding.forward
    monkeypatch.setattr(embedding, "forward", lambda *args, **kwargs: tuple(map(uneven, compute(*args, **kwargs))))
    assert FusedDecoder(decoder_of(model), ReferenceOps(), 256).table is None


Compute = Callable[[Any, Tensor, tuple[Tensor, Tensor]], Tensor]


def layers_of(base: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    for layer in base.layers:
        x = layer(x, position_embeddings=angles)
    return x


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda base, x, angles: base.norm(layers_of(base, x, angles)), None),
        (lambda base, x, angles: base.norm(layers_of(base, x * 32**0.5, angles)), "computes something else"),
        (lambda base, x, angles: layers_of(base, x, angles), "computes something else"),
        (lambda base, x, angles: base.norm(x), "does not call its layers"),
        (
            lambda base, x, angles: base.norm(base.layers[0](layers_of(base, x, angles))),
            "does not call its layers once",
        ),
        (lambda base, x, angles: base.norm(layers_of(base, x, angles[::-1])), "other angles than its rotary"),
        (lambda base, x, angles: base.norm(layers_of(base, x, None)), "other angles than its rotary"),
        (lambda base, x, angles: base.norm(layers_of(base, x, base.memory)), "cannot be called as a decoder"),
    ],
)
def test_what_a_base_model_computes_besides_its_layers(
    compute: Compute, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its modules are llama's."""
    model = unaccelerated("llama", tmp_path)
    base = model.model

    def forward(input_ids: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:
        x = base.embed_tokens(input_ids)
        hidden = compute(base, x, base.rotary_emb(x, position_ids))
        return BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(base, "forward", forward)
    if reason is None:
        assert len(decoder_of(model).layers) == 2
    else:
        with pytest.raises(NotRecognised, match=reason):
            decoder_of(model)
    assert not any("forward" in vars(layer) for layer in base.layers), "substitutes are gone"


def test_head_norms_that_differ_in_eps(tmp_path: Path) -> None:
    model = unaccelerated("qwen3", tmp_path)
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.1
    with pytest.raises(NotRecognised, match="norms that differ in eps"):
        decoder_of(model)
