"""Every option of the engine builds the same engine in-process and served (docs/architecture.md, "Invariants")."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_rig import HalfRightRunner, Info, PagedHashRunner

from inflight import LLM, worker
from inflight.config import ConfigError, EngineConfig
from inflight.engine.drafting.draft_model import ModelGuesser
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.heartbeat_listener import HeartbeatListener
from inflight.engine.pooler_facts import PoolerFacts
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.in_process import local_engine
from inflight.runner import pipeline

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "model_repository/demo/1/checkpoint")

# Each option with another value than its default, and with options that it needs.
OTHER: dict[str, dict[str, Any]] = {
    "enable_lora": {"enable_lora": True},
    "max_loras": {"enable_lora": True, "max_loras": 3},
    "max_lora_rank": {"enable_lora": True, "max_lora_rank": 9},
    "max_cpu_loras": {"enable_lora": True, "max_cpu_loras": 3},
    "lora_dtype": {"enable_lora": True, "lora_dtype": "float32"},
    "lora_allowed_paths": {"enable_lora": True, "lora_allowed_paths": ["/loras"]},
    "model": {},
    "tokenizer": {"tokenizer": DEMO},
    "revision": {"revision": "main"},
    "tokenizer_revision": {"tokenizer_revision": "main"},
    "download_dir": {"download_dir": "/tmp"},
    "trust_remote_code": {"trust_remote_code": True},
    "load_format": {"load_format": "dummy"},
    "dtype": {"dtype": "float32"},
    "device": {"device": "cpu"},
    "max_model_len": {"max_model_len": 32},
    "max_num_seqs": {"max_num_seqs": 3},
    "max_num_batched_tokens": {"max_num_batched_tokens": 99},
    "itl_target_ms": {"itl_target_ms": 7.0},
    "max_num_partial_prefills": {"max_num_partial_prefills": 3},
    "max_long_partial_prefills": {"max_num_partial_prefills": 3, "max_long_partial_prefills": 2},
    "long_prefill_token_threshold": {"long_prefill_token_threshold": 17},
    "async_scheduling": {"async_scheduling": False},
    "speculative_config": {"speculative_config": {"model": "hash", "num_speculative_tokens": 3}},
    "pooler_config": {"pooler_config": {"pooling_type": "MEAN"}},
    "hf_overrides": {"hf_overrides": {"is_matryoshka": True}},
    "block_size": {"block_size": 4},
    "gpu_memory_utilization": {"gpu_memory_utilization": 0.5},
    "kv_cache_memory": {"kv_cache_memory": "3MiB"},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "num_gpu_blocks_override": {"num_gpu_blocks_override": 9},
    "watermark": {"watermark": 0.2},
    "admission": {"admission": "free_blocks"},
    "preemption_victim": {"preemption_victim": "longest"},
    "swap_space": {"swap_space": 1},
    "preemption_mode": {"swap_space": 1, "preemption_mode": "swap"},
    "enable_prefix_caching": {"enable_prefix_caching": False},
    "kv_tiers": {"kv_tiers": [{"type": "host", "size": "1MiB"}]},
    "kv_store_secret_file": {"kv_store_secret_file": str(Path(__file__))},
    "kv_listen": {"kv_tiers": [{"type": "host", "size": "1MiB"}], "kv_listen": "127.0.0.1:7091"},
    "kv_events_config": {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
    "attention_backend": {"attention_backend": "reference"},
    "kernel_config": {"kernel_config": {"split_k": True}},
    "max_queue_size": {"max_queue_size": 5},
    "scheduling_policy": {"scheduling_policy": "priority"},
    "priority_aging_seconds": {"scheduling_policy": "priority", "priority_aging_seconds": 5.0},
    "sjf_aging_seconds": {"scheduling_policy": "sjf", "sjf_aging_seconds": 5.0},
    "edf_default_timeout": {"scheduling_policy": "edf", "edf_default_timeout": 5.0},
    "priority_classes": {"priority_classes": {2: {"max_queue_size": 6}}},
    "tenants": {"tenants": {"*": {"max_running": 1, "max_queued": 2}}},
    "tenant_header": {"tenants": {"*": {}}, "tenant_header": "x-tenant"},
    "stream_interval": {"stream_interval": 2},
    "default_max_tokens": {"default_max_tokens": 5},
    "generation_config": {"generation_config": "vllm"},
    "max_logprobs": {"max_logprobs": 5},
    "max_n": {"max_n": 5},
    "max_pooled_inputs": {"max_pooled_inputs": 5},
    "max_stop_strings": {"max_stop_strings": 5},
    "max_bad_words": {"max_bad_words": 5},
    "max_stop_token_ids": {"max_stop_token_ids": 5},
    "max_stop_bytes": {"max_stop_bytes": 5},
    "max_name_bytes": {"max_name_bytes": 5},
    "max_input_bytes": {"max_input_bytes": 5},
    "exclude_input_in_output": {"exclude_input_in_output": True},
    "wire_format": {"wire_format": "tensorrt_llm"},
    "seed": {"seed": 5},
    "cpu_threads": {"cpu_threads": 1},
    "chat_template": {"chat_template": "{{ messages }}"},
    "chat_template_timeout": {"chat_template_timeout": 1.0},
    "trust_request_chat_template": {"trust_request_chat_template": True},
    "enforce_eager": {"enforce_eager": True},
    "max_cudagraph_capture_size": {"max_cudagraph_capture_size": 64},
    "disable_log_stats": {"disable_log_stats": True},
    "python_executable": {"python_executable": "python3"},
    "step_trace": {"step_trace": 7},
    "otlp_traces_endpoint": {"otlp_traces_endpoint": "http://127.0.0.1:4318"},
    "check_on_load": {"check_on_load": False},
    "native_forward": {"native_forward": False},
    "quantization": {"quantization": "int8"},
    "head_bits": {"quantization": "int8", "head_bits": 6},
    "max_replays": {"max_replays": 1},
    "engine_timeout": {"engine_timeout": 5.0},
    "spare_engine": {"spare_engine": False},
    "engine_start_timeout": {"engine_start_timeout": 5.0},
    "shared_step_rows": {"shared_step_rows": 2},
    "short_prompt_share": {"short_prompt_share": 0.5},
    "shed_on_predicted_wait": {"shed_on_predicted_wait": False},
    "drain_timeout": {"drain_timeout": 5.0},
}


def make_hash_runner(config: EngineConfig) -> PagedHashRunner:
    """Instead of loading a checkpoint; `config` must be all that it depends on."""
    info = CheckpointInfo(num_host_blocks=int(bool(config.swap_bytes)) * 8)
    runner = PagedHashRunner(info, config.block_size, config.max_num_seqs)
    if config.speculative_config is not None:
        runner.draft_runner = HalfRightRunner(Info(), config.block_size, config.max_num_seqs)
    return runner


class CheckpointInfo(Info):
    pooler = PoolerFacts()
    dtype, device, attention_backend, load_seconds = "float32", "cpu", "none", 0.0


class Owner:
    def send(self, message: Any) -> None:
        raise AssertionError(f"the engine says {message}")


def served(options: dict[str, Any]) -> worker.Engine:
    """The engine that the process builds from a `model.json`, which it receives encoded."""
    config = EngineConfig.from_dict({"model": DEMO, "max_queue_size": 0, **options})
    config = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    page = Heartbeat.create(config.max_num_seqs)
    loaded = worker._load(Owner(), config, Heartbeat(page, config.max_num_seqs))  # type: ignore[arg-type]
    os.close(page)
    assert loaded is not None
    return loaded[0]


def built(value: Any, seen: dict[int, int]) -> Any:
    """The structure of an object of ours, down to plain data: classes, fields, and which objects are the same one."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, Enum)):
        return value
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        return value.__qualname__
    if isinstance(value, types.MethodType):
        return value.__qualname__, built(value.__self__, seen)
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(built(key, seen), built(item, seen)) for key, item in value.items()]
    if isinstance(value, Iterable) and not type(value).__module__.startswith("inflight"):
        return [built(item, seen) for item in value]
    if isinstance(value, PagedHashRunner):
        return type(value).__name__
    names = [*getattr(value, "__dict__", {}), *(name for kind in type(value).__mro__ for name in _slots(kind))]
    fields = {name: built(getattr(value, name), seen) for name in names if hasattr(value, name)}
    return type(value).__qualname__, fields


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name != "__dict__"]


def test_the_table_has_every_option() -> None:
    assert list(OTHER) == list(EngineConfig.__struct_fields__)
    default = EngineConfig(model="m")
    for name, options in OTHER.items():
        if name != "model":
            assert getattr(EngineConfig.from_dict({"model": "m", **options}), name) != getattr(default, name), name


def test_every_option_builds_the_same_engine_served_and_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, which is the default and decides other defaults."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tokenizer = Tokenizer.load(DEMO)
    monkeypatch.setattr(Tokenizer, "load", lambda *args, **options: tokenizer)
    for module in (local_engine, pipeline):
        monkeypatch.setattr(module, "make_runner", make_hash_runner)
    default = None
    for name, options in sorted(OTHER.items(), key=lambda item: item[0] != "model"):
        engine = served(options)
        if name in ("download_dir", "otlp_traces_endpoint"):
            with pytest.raises(ConfigError, match=rf"{name} is for .*Triton"):
                LLM(DEMO, **options)
            continue
        ours = LLM(DEMO, **options)
        engine.core.listeners[:] = [one for one in engine.core.listeners if not isinstance(one, HeartbeatListener)]
        theirs, mine = built((engine.core, engine.trace), {}), built((ours.core, ours.trace), {})
        assert theirs == mine, name
        if name == "model":
            default = mine
        else:
            assert mine != default, f"{name} is not part of what was compared"


def test_a_draft_model_that_is_served_is_asked() -> None:
    engine = served({"speculative_config": {"model": DEMO, "kv_cache_memory": "8MiB"}, "kv_cache_memory": "8MiB"})
    safe: Any = engine.core.scheduler.policies.drafter
    assert isinstance(safe.inner._inner._guesser, ModelGuesser)
