"""Loading: unsupported features are rejected by name, memory is planned, facts are reported."""

from __future__ import annotations

import json
import shutil
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from offline import make_core, run, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from inflight.attention.reference import ReferenceAttention
from inflight.byte_sizes import format_bytes
from inflight.config import ConfigError, EngineConfig
from inflight.device import memory
from inflight.engine.sampling_params import SamplingParams
from inflight.loading import loader
from inflight.loading.checkpoint import weights
from inflight.loading.loader import LoadError, load

TINY = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def config(path: str, **options) -> EngineConfig:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", **options}
    return EngineConfig.from_dict({"model": path, **options})


def saved(model_type: str, folder, **changes) -> str:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY, **changes}))
    model.save_pretrained(folder / model_type)
    return str(folder / model_type)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("loader"), eos_token_id=[5, 7])


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba", {}, "'mamba': layer 0 is of type 'linear_attention'; only full, sliding and chunked"),
        ("bloom", {}, "'bloom' is not supported: its attention does not use transformers' AttentionInterface"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "'lfm2': layer 0 is of type 'conv'; only full,"),
        ("mpt", {}, "'mpt' is not supported: its attention does not use transformers' AttentionInterface"),
    ],
)
def test_unsupported_architectures_are_rejected(tmp_path, model_type, changes, message):
    with pytest.raises(LoadError, match=message):
        load(config(saved(model_type, tmp_path, **changes)))


def edited(source: str, folder, **changes) -> str:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, r"\d+ weights are in none of its files, such as model\.layers\.2\."),
        (
            {"vocab_size": 120},
            r"weights do not match its config.json: lm_head.weight has shape \[199, 32\], not \[120, 32\]",
        ),
        ({"num_attention_heads": 5}, "is not a readable checkpoint: .*validat.* .*5"),
    ],
)
def test_weights_are_never_initialised_randomly(tmp_path, llama, changes, message):
    with pytest.raises(LoadError, match=message):
        load(config(edited(llama, tmp_path / "edited", **changes)))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 5000, (8).to_bytes(8, "little") + b"not json", None])
def test_damaged_weights_are_rejected_in_one_line(tmp_path, llama, content):
    path = edited(llama, tmp_path / "damaged")
    (file,) = Path(path).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(LoadError, match=r"damaged or incomplete \(.+\); download it again") as caught:
        load(config(path))
    assert "\n" not in str(caught.value)


def test_a_model_with_wrong_logits_is_rejected(llama, monkeypatch):
    attend = ReferenceAttention.attend
    monkeypatch.setattr(ReferenceAttention, "attend", lambda self, *args: attend(self, *args) * 1.05)
    with pytest.raises(LoadError, match="the logits of a test batch differ by"):
        load(config(llama, attention_backend="reference"))
    load(config(llama, attention_backend="reference", check_on_load=False))


def test_a_pool_that_is_too_small_is_rejected_with_the_missing_amount(llama, monkeypatch):
    with pytest.raises(LoadError, match=r"holds 48 tokens in 3 blocks.*takes 16 blocks, .* more"):
        load(config(llama, num_gpu_blocks_override=3))
    with pytest.raises(LoadError, match="set max_model_len to at most 48"):
        load(config(llama, num_gpu_blocks_override=3))
    assert load(config(llama, num_gpu_blocks_override=3, max_model_len=48)).info.num_blocks == 3
    monkeypatch.setattr(weights, "available_memory", lambda device: 1000)
    with pytest.raises(LoadError, match=r"the weights of .* take .* as float32, .* more than the 1000 B free"):
        load(config(llama))


def test_the_pool_takes_a_share_of_the_ram_but_no_more_than_it_can_use(llama, monkeypatch):
    monkeypatch.setattr(loader, "available_memory", lambda device: 10 * 2**20)
    info = load(config(llama, kv_cache_memory=None, max_num_seqs=4096)).info
    assert 3.9 * 2**20 < info.kv_bytes <= 4 * 2**20
    monkeypatch.setattr(loader, "available_memory", lambda device: 2**40)
    assert load(config(llama, kv_cache_memory=None, max_num_seqs=2)).info.num_blocks == 2 * 256 // 16


def test_facts_of_the_checkpoint(llama):
    info = load(config(llama)).info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids, info.dtype) == (256, 199, [5, 7], "float32")
    assert load(config(llama, dtype="auto")).dtype == torch.float32
    assert load(config(llama, dtype="bfloat16")).model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="max_model_len=300 exceeds the checkpoint's 256 positions"):
        load(config(llama, max_model_len=300))


def test_remote_code_does_not_run_unless_trusted(tmp_path, llama):
    path = tmp_path / "remote"
    shutil.copytree(llama, path)
    values = json.loads((path / "config.json").read_text())
    values |= {"model_type": "mystery", "auto_map": {"AutoConfig": "mystery.Config"}}
    (path / "config.json").write_text(json.dumps(values))
    (path / "mystery.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(LoadError, match="is not a readable checkpoint"):
        load(config(str(path)))


def test_available_memory_and_its_format():
    assert 2**20 < memory.available_memory(torch.device("cpu")) < 2**50
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 * 2**30) == "3.00 GiB"


def test_a_pool_of_one_block(llama):
    core = make_core(llama, num_gpu_blocks_override=1, max_model_len=16, block_size=16)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    deltas = run(core, [[1, 2, 3], [4, 5]], [params, params])
    assert [tokens(deltas[i, 0]) for i in range(2)] == greedy_reference(llama, [[1, 2, 3], [4, 5]], [6, 6])


def share_in_memory(tensor: torch.Tensor) -> float:
    """Share of a tensor's pages that the system has provided."""
    first, last = tensor.data_ptr() // PAGESIZE + 1, (tensor.data_ptr() + tensor.nbytes) // PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.fromfile(pagemap, np.uint64, last - first)
    return float((entries >> np.uint64(63)).mean())


def test_with_a_latency_target_the_pool_has_its_pages_at_load(llama, monkeypatch):
    caches = []
    new_cache = ReferenceAttention.new_cache
    monkeypatch.setattr(ReferenceAttention, "new_cache", lambda *args: caches.append(new_cache(*args)) or caches[-1])
    # Larger than the memory that was freed before, whose pages exist already.
    load(config(llama, attention_backend="reference", kv_cache_memory="160MiB", itl_target_ms=40))
    shares = [share_in_memory(tensor) for cache in caches for tensor in (cache.key, cache.value)]
    assert len(shares) >= 4
    assert min(shares) == 1.0
