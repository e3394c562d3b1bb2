"""`model.json`: what is accepted, and what the errors say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inflight import vllm_options
from inflight.config import ConfigError, EngineConfig, parse_bytes
from inflight.kv_tiers_config import KVTier
from inflight.model_json import read_model_json


def test_defaults_are_vllms() -> None:
    config = EngineConfig.from_dict({"model": "x"})
    assert (config.max_num_seqs, config.block_size, config.gpu_memory_utilization) == (256, 16, 0.9)
    assert (config.enable_prefix_caching, config.trust_remote_code, config.default_max_tokens) == (True, False, 16)


def test_invalid_options_are_named() -> None:
    for values, message in [
        ({}, '"model" is missing'),
        ({"model": "x", "max_num_seq": 4}, "unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"model": "x", "zzz": 4}, "unknown key 'zzz'; known keys: "),
        ({"model": "x", "max_num_seqs": 0}, "max_num_seqs=0: Expected `int` >= 1"),
        ({"model": "x", "max_num_seqs": "many"}, "max_num_seqs='many': Expected `int`, got `str`"),
        ({"model": "x", "max_num_seqs": "0"}, "max_num_seqs='0': Expected `int` >= 1"),
        ({"model": "x", "dtype": "int4"}, "dtype='int4': .*must be one of 'auto', 'float32', 'bfloat16', 'float16'"),
        (
            {"model": "x", "quantization": "int3"},
            "quantization='int3': .*must be one of 'int8', 'fp8', 'int4', 'auto-round', 'awq', .*'gptq', 'mxfp4'$",
        ),
        ({"model": "x", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        (
            {"model": "x", "tensor_parallel_size": 2},
            "tensor_parallel_size=2 is not supported: this engine runs on one device",
        ),
        ({"model": "x", "kv_cache_memory": "four"}, "cannot read 'four' as a size"),
        ({"model": "x", "kv_cache_memory": 0}, "kv_cache_memory=0: must be more than 0 bytes"),
        ({"model": "x", "swap_space": "four"}, "cannot read 'four' as a size"),
        ({"model": "x", "swap_space": -1}, "swap_space=-1: Expected `float` >= 0"),
        ({"model": "x", "preemption_mode": "swap"}, 'preemption_mode="swap" needs host memory .* set swap_space'),
        ({"model": "x", "watermark": 1.0}, "watermark=1.0: Expected `float` < 1"),
        ({"model": "x", "preemption_victim": "oldest"}, "must be one of 'last', 'lowest_priority', 'longest'"),
        ({"model": "x", "admission": "all"}, "admission='all': .*must be one of 'predicted_peak', 'free_blocks'"),
        (["model"], "expected a JSON object, got list"),
        ({"model": "x", "scheduling_policy": "lifo"}, "'lifo'.*must be one of 'fcfs', 'priority', 'sjf', 'edf'"),
        ({"model": "x", "priority_aging_seconds": 0}, "priority_aging_seconds=0: Expected `float` > 0"),
        ({"model": "x", "priority_aging_seconds": float("inf")}, "priority_aging_seconds=inf"),
        ({"model": "x", "priority_classes": {"P0": {"max_queue_size": 3}}}, "'P0'.*Expected `int`, got `str`"),
        ({"model": "x", "priority_classes": {"0": {"max_queue_size": 0}}}, "Expected `int` >= 1"),
        (
            {"model": "x", "tenants": {"a": {"wieght": 3}}},
            "'wieght'.*must be one of 'weight', 'max_running', 'max_queued'",
        ),
        ({"model": "x", "kv_cache_memory": "four"}, "kv_cache_memory: cannot read"),
        ({"model": "x", "swap_space": "four"}, "swap_space: cannot read"),
        ({"model": "x", "max_num_batched_tokens": 2**31}, "max_num_batched_tokens=2147483648: Expected `int` <= 2147"),
        ({"model": "x", "default_max_tokens": 2**31}, "default_max_tokens=2147483648"),
        ({"model": "x", "max_model_len": 1}, "max_model_len=1: Expected `int` >= 2"),
        ({"model": "x", "seed": 2**63}, "seed=9223372036854775808"),
        ({"model": "x", "seed": 10**40}, "seed=1000"),
        ({"model": "x", "cpu_threads": 100_000}, "cpu_threads=100000"),
        ({"model": "x", "async_scheduling": "on"}, "async_scheduling='on': .*must be one of 'auto', True, False$"),
        ({"model": "x", "max_cudagraph_capture_size": 4096}, "max_cudagraph_capture_size=4096: Expected `int` <= 2048"),
        (
            {"model": "x", "max_cudagraph_capture_size": 64, "attention_backend": "flash3"},
            'max_cudagraph_capture_size=64 with attention_backend="flash3", .* set it to 0, or use .*"gpu"',
        ),
        ({"model": "x", "itl_target_ms": float("inf")}, "itl_target_ms=inf"),
        ({"model": "x", "engine_start_timeout": 1e300}, "engine_start_timeout=1e\\+300"),
        ({"model": "x", "priority_classes": {"9" * 30: {"max_queue_size": 3}}}, "priority_classes=.*Expected `int`"),
        ({"model": "x", "chat_template": "\ud800"}, "'chat_template' contains an unpaired surrogate"),
        ({"model": "x", "tenants": {"\ud800": {}}}, "'tenants' contains an unpaired surrogate"),
        ({"model": "x", "max_num_seqs": "\ud800"}, "'max_num_seqs' contains an unpaired surrogate"),
        ({"model": "x", "tenants": {"a": {"weight": 0}}}, r"tenants=\{'a': \{'weight': 0\}\}: Expected `float` > 0"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            EngineConfig.from_dict(values)
        assert str(caught.value).isprintable()


def test_swap_space_is_in_gib_or_a_size() -> None:
    sizes = {4: 4 * 2**30, 0.5: 2**29, "512MiB": 2**29, 0: 0}
    for value, size in sizes.items():
        assert EngineConfig.from_dict({"model": "x", "swap_space": value}).swap_bytes == size


def test_files(tmp_path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(ConfigError, match="no such file"):
        read_model_json(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_model_json(path)
    path.write_text('{"model": "x", "seed": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=r"not valid JSON|seed="):
        read_model_json(path)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match="checkpoint: cannot be read: Is a directory"):
        read_model_json(tmp_path / "checkpoint")
    path.write_text(json.dumps({"model": "checkpoint"}))
    assert read_model_json(path).model == str(tmp_path / "checkpoint"), "the folder beside the file"
    path.write_text(json.dumps({"model": "org/name"}))
    assert read_model_json(path).model == "org/name"


def test_sizes() -> None:
    for text, size in [("4GiB", 4 * 2**30), ("1.5 K", 1500), ("2M", 2 * 10**6), (77, 77)]:
        assert parse_bytes(text) == size


NEUTRAL = {
    "config_format": "auto",
    "cpu_offload_gb": 0,
    "disable_custom_all_reduce": True,
    "distributed_executor_backend": "ray",
    "enable_chunked_prefill": True,
    "enable_log_requests": False,
    "enable_lora": False,
    "load_format": "auto",
    "max_seq_len_to_capture": 8192,
    "pipeline_parallel_size": 1,
    "runner": "generate",
    "served_model_name": "llama",
    "task": "generate",
    "tokenizer_mode": "auto",
}


def test_keys_of_vllm_that_ask_for_nothing_special_change_nothing() -> None:
    neutral = EngineConfig(model="x", stream_interval=1)  # an entry of vllm_backend
    assert EngineConfig.from_dict({"model": "x", **NEUTRAL}) == neutral
    strings = {key: str(value).lower() for key, value in NEUTRAL.items()}
    assert EngineConfig.from_dict({"model": "x", **strings}) == neutral
    assert EngineConfig.from_dict({"model": "x", **dict.fromkeys(NEUTRAL.keys() - {"load_format"})}).model == "x"


@pytest.mark.parametrize(
    ("backend", "values", "interval"),
    [
        ("inflight", {}, "auto"),
        ("vllm", {}, 1),
        ("inflight", {"disable_log_requests": True}, 1),
        ("inflight", {"kv_cache_memory_bytes": 2**30}, 1),
        ("inflight", {"gpu_memory_utilization": 0.5, "enforce_eager": True}, "auto"),
        ("vllm", {"stream_interval": "auto", "task": "generate"}, "auto"),
        ("vllm", {"stream_interval": 4}, 4),
    ],
)
def test_an_entry_of_vllm_backend_sends_every_token(
    tmp_path: Path, backend: str, values: dict[str, Any], interval: object
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model": "x", **values}))
    assert read_model_json(path, backend).stream_interval == interval
    path.write_text("[]")
    with pytest.raises(ConfigError):
        read_model_json(path, backend)


def test_keys_of_vllm_that_would_change_something_are_refused_by_name() -> None:
    for key, value, message in [
        ("enable_lora_bias", True, "enable_lora_bias=True is not supported: .*merge the adapter"),
        ("enable_lora_bias", "True", "enable_lora_bias='True' is not supported"),
        ("enable_lora", "maybe", "enable_lora='maybe': Expected `bool`"),
        ("max_lora_rank", 0, "max_lora_rank=0: Expected `int` >= 1"),
        ("max_cpu_loras", 0, "max_cpu_loras=0: Expected `int` >= 1"),
        ("lora_dtype", "int8", "lora_dtype='int8': .*must be one of 'auto', 'float32', 'bfloat16', 'float16'"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size=2 .*one device; omit it or set it to 1"),
        ("enable_chunked_prefill", False, "enable_chunked_prefill=False .*raise it; omit it or set it to true"),
        ("tokenizer_mode", "mistral", "tokenizer_mode='mistral'"),
        ("enable_log_requests", 1, "enable_log_requests=1 .*step_trace"),
        ("task", "reward", "task='reward' .*one engine generates, embeds and scores"),
        ("runner", "draft", "runner='draft'"),
        ("pooler_config", {"pooling_type": "MAX"}, "Invalid enum value 'MAX'"),
        ("hf_overrides", {"num_labels": 3}, "unknown field `num_labels`"),
        ("cpu_offload_gb", 0.5, "cpu_offload_gb=0.5"),
        ("load_format", "tensorizer", "load_format='tensorizer': .*must be one of 'auto', 'dummy'"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype='fp8_e5m2': .*must be one of"),
        ("speculative_config", {}, "neither method nor model is set; set method to"),
        ("speculative_config", {"method": "eagle"}, "Invalid enum value 'eagle'; must be one of 'suffix', 'ngram'"),
        ("speculative_config", {"method": "suffix", "depth": 3}, "unknown field `depth`; must be one of 'method', "),
        ("speculative_config", {"method": "ngram", "model": "x"}, "method='ngram' has no model; remove one"),
        ("speculative_config", {"method": "draft_model"}, "needs model: a small checkpoint"),
        ("speculative_config", {"model": "x", "kv_cache_memory": "?"}, "speculative_config.kv_cache_memory: .*'?'"),
        ("speculative_config", {"model": "x", "kv_cache_memory": 0}, "kv_cache_memory.* >= 1"),
        ("speculative_config", {"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min=6 is more than .*=5"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 0}, "Expected `int` >= 1"),
        ("kernel_config", {"splitk": True}, "unknown field `splitk`; must be one of 'split_k'"),
        ("kernel_config", {"split_k": "maybe"}, "kernel_config=.*Expected `bool`"),
        ("max_logprobs", -2, "max_logprobs=-2: Expected `int` >= -1"),
        ("wire_format", "openai", "wire_format='openai': .*must be one of 'vllm', 'tensorrt_llm'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_dict({"model": "x", key: value})


def test_names_and_spellings_of_vllm() -> None:
    for given, meant in [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"quantization": "awq_marlin"}, {"quantization": "awq"}),
        ({"quantization": "gptq_marlin"}, {"quantization": "gptq"}),
        ({"quantization": "bitsandbytes", "load_format": "bitsandbytes"}, {"quantization": "bitsandbytes"}),
        ({"quantization": "gguf", "load_format": "gguf"}, {"quantization": "gguf"}),
        ({"kv_cache_memory_bytes": 2**30}, {"kv_cache_memory": 2**30}),
        ({"kv_offloading_size": "0.5"}, {"kv_tiers": [KVTier(type="host", size=2**29)]}),
        ({"kv_offloading_backend": "native"}, {"kv_tiers": []}),
        ({"kv_offloading_size": None}, {"kv_tiers": []}),
        ({"max_num_seqs": "8", "gpu_memory_utilization": "0.5"}, {"max_num_seqs": 8, "gpu_memory_utilization": 0.5}),
        ({"enforce_eager": "True", "trust_remote_code": "0"}, {"enforce_eager": True, "trust_remote_code": False}),
        ({"step_trace": "true"}, {"step_trace": True}),
        ({"step_trace": 1}, {"step_trace": 1}),
        ({"swap_space": "4"}, {"swap_space": 4}),
        ({"async_scheduling": None}, {"async_scheduling": "auto"}),
        ({"async_scheduling": "True"}, {"async_scheduling": True}),
        ({"max_logprobs": -1, "download_dir": "/cache"}, {"max_logprobs": -1, "download_dir": "/cache"}),
    ]:
        found, expected = (EngineConfig.from_dict({"model": "x", **values}) for values in (given, meant))
        assert (found.swap_bytes, found.num_traced_steps) == (expected.swap_bytes, expected.num_traced_steps)
        for key, value in meant.items():
            assert key == "swap_space" or (getattr(found, key), type(getattr(found, key))) == (value, type(value))


@pytest.mark.parametrize("size", ["four", 0, -1, float("inf"), []])
def test_a_size_to_offload_is_a_number_of_gibibytes(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size=.*: give GiB of host memory, such as 4"):
        EngineConfig.from_dict({"model": "x", "kv_offloading_size": size})


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ({"type": "disk", "size": 1}, 'type="disk" needs path'),
        ({"type": "host"}, 'type="host" needs size'),
        ({"type": "host", "size": 1, "path": "/kv"}, 'type="host" has no path; remove it'),
        ({"type": "redis"}, 'type="redis" needs url'),
        ({"type": "redis", "url": "http://kv"}, "url must start with redis://"),
        ({"type": "tape", "size": 1}, "must be one of 'host', 'disk', 'redis', 'lmcache'"),
        ({"type": "lmcache"}, 'type="lmcache" needs url'),
        ({"type": "lmcache", "url": "127.0.0.1:5555"}, "is not like tcp://127.0.0.1:5555"),
        ({"type": "lmcache", "url": "tcp://kv"}, "url='tcp://kv' is not like tcp://"),
        ({"type": "lmcache", "url": "tcp://u:p@kv:5555"}, "is not like tcp://"),
        ({"type": "lmcache", "url": "tcp://kv:5555", "password_file": "/p"}, "has no password_file; remove it"),
        ({"type": "lmcache", "url": "tcp://kv:5555", "path": "/p"}, 'type="lmcache" has no path; remove it'),
        ({"type": "host", "size": "0"}, r"kv_tiers\[0\].size='0': must be more than 0 bytes"),
        ({"type": "host", "size": "much"}, r"kv_tiers\[0\].size: cannot read 'much' as a size"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(tier: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_dict({"model": "x", "kv_tiers": [tier]})


def test_an_option_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="'kv_cache_memory_bytes' and 'kv_cache_memory' are the same option"):
        EngineConfig.from_dict({"model": "x", "kv_cache_memory_bytes": 5, "kv_cache_memory": 5})


def test_the_tokenizers_revision_is_the_checkpoints_unless_set() -> None:
    revisions = {"revision": "a"}, {"revision": "a", "tokenizer_revision": "b"}, {}
    found = [EngineConfig.from_dict({"model": "x", **given}).tokenizer_source_revision for given in revisions]
    assert found == ["a", "b", None]


def test_the_page_on_migrating_names_every_key_of_vllm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    assert named >= {*vllm_options._FIXED, *vllm_options._WITHOUT_EFFECT, *vllm_options._RENAMED}


def test_options_without_effect_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.from_dict({"model": "x", "use_v2_block_manager": True, "disable_log_requests": True})
    assert "no effect in this engine: disable_log_requests, use_v2_block_manager" in caplog.text
