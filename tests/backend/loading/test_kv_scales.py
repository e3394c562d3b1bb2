"""The scales of an fp8 KV pool: set at load from the checkpoint or by calibration, and never again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from fp8_checkpoints import compress, compressed_tensors, set_quantization
from fp8_twins import fp8_twins
from nightly import nightly_but
from offline import make_core, run, tokens
from paged_case import PagedCase
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import interpreted
from inflight.loading.load_errors import LoadError

NO_INTERPRETER: dict[str, Any] = {"condition": not interpreted(), "reason": "kernels are compiled for the GPU here"}
HEADS, SIZE = 2, 8  # KV heads, and elements of each
MAX_LEN = 64


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path)


def core_of(path: str, **options: Any) -> Any:
    with fp8_twins():
        return make_core(path, **{"kv_cache_dtype": "fp8", "max_model_len": MAX_LEN, "max_num_seqs": 2, **options})


def caches_of(core: Any) -> list[Any]:
    return [layer.self_attn.inflight.cache for layer in core.runner.model.model.layers]


def scales_of(core: Any) -> list[torch.Tensor]:
    return [scale.clone() for cache in caches_of(core) for scale in (cache.key_scale, cache.value_scale)]


def add_scales(path: str, scales: dict[str, Any]) -> None:
    file = Path(path) / "model.safetensors"
    tensors = load_file(file) | {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(tensors, file, metadata={"format": "pt"})


UNCHECKED = {"check_on_load": False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        UNCHECKED,
        {"native_forward": False},
        {**UNCHECKED, "load_format": "dummy"},
        pytest.param({**UNCHECKED, "attention_backend": "gpu"}, marks=pytest.mark.skipif(**NO_INTERPRETER)),
    ],
    ids=str,
)
def test_they_are_set_at_load_and_no_write_changes_them(folder: str, options: dict[str, Any]) -> None:
    core = core_of(folder, **options)
    before = scales_of(core)
    numbers = torch.cat(before)
    assert len(numbers) == len(set(numbers.tolist())) == 2 * 2 * HEADS, "one for each layer, head, and key or value"
    assert bool(((numbers > 1e-6) & (numbers < 1)).all())
    run(core, [[5, 6, 7]], [SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)])
    backend, cache = core.runner.backend, caches_of(core)[0]
    case = PagedCase(core.runner.model.model.layers[0].self_attn.inflight.spec, [3], [3], core.config.block_size)
    huge = torch.full((3, HEADS, SIZE), 1e30)
    backend.write(huge, huge, cache, backend.prepare(case.metadata([3])))
    assert all(map(torch.equal, scales_of(core), before))


@pytest.mark.parametrize("bos", [None, 3])
def test_calibration_sees_what_the_model_computes(tmp_path: Path, bos: int | None) -> None:
    """Largest numbers of each head by transformers' own attention and cache, with room for four times as much."""
    torch.set_num_threads(1)
    path = make_checkpoint("gemma3_text", tmp_path, bos_token_id=bos)  # windows of 16 tokens
    core = core_of(path)
    ids = np.random.default_rng(0).integers(0, VOCAB, MAX_LEN)
    if bos is not None:
        ids[0] = bos
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        caches = model(input_ids=torch.from_numpy(ids)[None]).past_key_values.layers
    full = [index for index, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert full
    for index in full:  # the other layers' caches have dropped what left the window
        cache = caches_of(core)[index]
        for scale, rows in ((cache.key_scale, caches[index].keys), (cache.value_scale, caches[index].values)):
            torch.testing.assert_close(scale, rows[0].abs().amax(dim=(1, 2)) * 4 / 448)


def test_those_of_the_checkpoint_are_used(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """One number for all heads, or one for each; layers without them are calibrated."""
    calibrated = scales_of(core_of(folder))
    name = "model.layers.0.self_attn"
    add_scales(folder, {f"{name}.k_scale": 0.5, f"{name}.v_scale": [[[0.25]], [[0.125]]]})
    with caplog.at_level(logging.INFO, "inflight"):
        key, value, *others = scales_of(core_of(folder))
    assert key.tolist() == [0.5, 0.5]
    assert value.tolist() == [0.25, 0.125]
    assert all(map(torch.equal, others, calibrated[2:]))
    assert "2 of 4 scales are the checkpoint's" in caplog.text


def test_those_for_another_type_are_not(folder: str) -> None:
    calibrated = scales_of(core_of(folder))
    compress(folder, "per channel")
    add_scales(folder, {"model.layers.0.self_attn.k_scale": 0.5})
    for kind, used in (("int", False), ("float", True)):
        scheme = dict(num_bits=8, type=kind, symmetric=True, strategy="tensor", dynamic=False)
        set_quantization(folder, compressed_tensors("channel", "token", kv_cache_scheme=scheme))
        found = scales_of(core_of(folder))
        assert (found[0].tolist() == [0.5, 0.5]) == used
        assert 0.5 < (found[1] / calibrated[1]).max() < 2


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.0, r"k_scale is \[0.0\]"),
        (float("nan"), "k_scale is .*positive and finite"),
        ([1.0] * 3, "k_scale has 3 num"),
    ],
)
def test_a_useless_scale_is_refused_by_name(folder: str, scale: Any, message: str) -> None:
    add_scales(folder, {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(LoadError, match="model.layers.1.self_attn." + message):
        core_of(folder)


@pytest.mark.parametrize("quantization", nightly_but(["fp8"], [None, "fp8"]))
def test_a_whole_engine_by_the_twin(folder: str, quantization: str | None) -> None:
    """Any batch, chunks, preemption by recompute and by swap, n > 1: the same tokens, and not those of a plain pool."""
    prompts = [[7, 3, 9, 100, 5] * 6, [1, 2, 3], [50] * 33]
    params = [SamplingParams(max_tokens=16, temperature=0.8, n=n, seed=n, ignore_eos=True) for n in (1, 2, 3)]
    small = {"block_size": 4, "num_gpu_blocks_override": 34, "max_num_seqs": 6}
    outputs, preemptions = [], []
    for options in (
        {},
        {"max_num_batched_tokens": 24},
        {**small, "preemption_mode": "recompute"},
        {**small, "preemption_mode": "swap", "swap_space": "1MiB"},
    ):
        core = core_of(folder, quantization=quantization, **options)
        outputs.append({key: tokens(deltas) for key, deltas in run(core, prompts, params).items()})
        preemptions.append(core.scheduler.num_preempted_total)
    assert all(output == outputs[0] for output in outputs)
    assert preemptions[2] > 0
    assert preemptions[3] > 0
    plain = run(make_core(folder), prompts, params)
    assert outputs[0] != {key: tokens(deltas) for key, deltas in plain.items()}
