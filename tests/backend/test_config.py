"""`model.json`: what is accepted, and what the errors say."""

from __future__ import annotations

import json

import pytest

from inflight.config import ConfigError, EngineConfig, parse_bytes


def test_defaults_are_vllms() -> None:
    config = EngineConfig.from_dict({"model": "x"})
    assert (config.max_num_seqs, config.block_size, config.gpu_memory_utilization) == (256, 16, 0.9)
    assert (config.enable_prefix_caching, config.trust_remote_code, config.default_max_tokens) == (True, False, 16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, '"model" is missing'),
        ({"model": "x", "max_num_seq": 4}, "unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"model": "x", "zzz": 4}, "unknown key 'zzz'; known keys: "),
        ({"model": "x", "max_num_seqs": 0}, "max_num_seqs=0: Expected `int` >= 1"),
        ({"model": "x", "max_num_seqs": "8"}, "max_num_seqs='8': Expected `int`, got `str`"),
        ({"model": "x", "dtype": "int4"}, "dtype='int4': .*must be one of 'auto', 'float32', 'bfloat16', 'float16'"),
        ({"model": "x", "quantization": "int3"}, "quantization='int3': .*must be one of 'int8', 'fp8'$"),
        ({"model": "x", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"model": "x", "tensor_parallel_size": 2}, "tensor_parallel_size=2: this engine runs on one device"),
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
        ({"model": "x", "itl_target_ms": float("inf")}, "itl_target_ms=inf"),
        ({"model": "x", "engine_start_timeout": 1e300}, "engine_start_timeout=1e\\+300"),
        ({"model": "x", "priority_classes": {"9" * 30: {"max_queue_size": 3}}}, "priority_classes=.*Expected `int`"),
        ({"model": "x", "chat_template": "\ud800"}, "'chat_template' contains an unpaired surrogate"),
        ({"model": "x", "tenants": {"\ud800": {}}}, "'tenants' contains an unpaired surrogate"),
        ({"model": "x", "max_num_seqs": "\ud800"}, "'max_num_seqs' contains an unpaired surrogate"),
        ({"model": "x", "tenants": {"a": {"weight": 0}}}, r"tenants=\{'a': \{'weight': 0\}\}: Expected `float` > 0"),
    ],
)
def test_invalid_options_are_named(values: dict, message: str) -> None:
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
        EngineConfig.from_file(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        EngineConfig.from_file(path)
    path.write_text('{"model": "x", "seed": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=r"not valid JSON|seed="):
        EngineConfig.from_file(path)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match="checkpoint: cannot be read: Is a directory"):
        EngineConfig.from_file(tmp_path / "checkpoint")
    path.write_text(json.dumps({"model": "checkpoint"}))
    assert EngineConfig.from_file(path).model == str(tmp_path / "checkpoint"), "the folder beside the file"
    path.write_text(json.dumps({"model": "org/name"}))
    assert EngineConfig.from_file(path).model == "org/name"


@pytest.mark.parametrize(("text", "size"), [("4GiB", 4 * 2**30), ("1.5 K", 1500), ("2M", 2 * 10**6), (77, 77)])
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size
