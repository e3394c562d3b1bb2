"""`load_format: "dummy"`: random weights from config.json alone, for benchmarks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from nightly import ARCHITECTURES_IN_SHORT, nightly_but
from offline import make_core, run, tokens

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.checkpoint import weights
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load


def config_only(model_type: str, folder: Path) -> str:
    """A directory with nothing but config.json."""
    torch.set_num_threads(1)
    source = Path(make_checkpoint(model_type, folder / "whole", initializer_range=0.02))
    target = folder / "config"
    target.mkdir()
    shutil.copy(source / "config.json", target)
    return str(target)


@pytest.mark.parametrize("model_type", nightly_but(ARCHITECTURES_IN_SHORT, ARCHITECTURES))
def test_every_architecture_runs_on_random_weights(model_type: str, tmp_path: Path) -> None:
    """The check at load runs as usual, so attention over the pool is right as well."""
    path = config_only(model_type, tmp_path)
    core = make_core(path, load_format="dummy", native_forward=False)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=0, ignore_eos=True)
    deltas = run(core, [[1, 2, 3, 4]], [params])[0, 0]
    assert len(tokens(deltas)) == 5
    entries = [entry for delta in deltas for entry in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ()))]
    assert all(-20 < logprob <= 0 for entry in entries for _, logprob, _ in entry)


def test_they_are_the_same_ones_each_time(tmp_path: Path) -> None:
    path = config_only("llama", tmp_path)
    options = {"model": path, "device": "cpu", "load_format": "dummy", "kv_cache_memory": "8MiB"}
    config = EngineConfig.from_dict({**options, "native_forward": False, "dtype": "bfloat16"})
    torch.manual_seed(1)
    first = load(config).model
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(3), expected), "the generator of others is where it was"
    second = load(config).model
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters()):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
        if one.dim() > 1:
            assert 0.015 < one.float().std() < 0.025, name


def test_on_the_native_forward_pass_too(tmp_path: Path) -> None:
    core = make_core(config_only("llama", tmp_path), load_format="dummy")
    deltas = run(core, [[5, 6]], [SamplingParams(max_tokens=4, ignore_eos=True)])
    assert len(tokens(deltas[0, 0])) == 4


def test_without_it_the_weights_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be loaded"):
        make_core(config_only("llama", tmp_path))


def test_what_does_not_fit_is_refused_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available_memory", lambda device: 1000)
    with pytest.raises(LoadError, match=r"the weights of .* take .* as float32, .* more than the 1000 B free"):
        make_core(config_only("llama", tmp_path), load_format="dummy")


def test_unsupported_architectures_are_rejected_by_name(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mpt", vocab_size=99, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    config.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="does not use transformers' AttentionInterface"):
        make_core(str(tmp_path), load_format="dummy", max_model_len=64)
