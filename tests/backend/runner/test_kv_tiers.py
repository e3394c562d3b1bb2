"""KV tiers with real checkpoints: the bytes of blocks, what they belong to, and answers in a new engine."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from safetensors.torch import load_file, save_file
from worker_rig import Worker

from inflight import LLM, SamplingParams
from inflight.attention.base import KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.config import ConfigError, EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.messages import AddRequest, EngineReady, StepMessage
from inflight.engine.policies import tier_admission
from inflight.engine.sampling_params import SamplingParams as EngineParams
from inflight.kernels.cpu.cpu_attention import CpuAttention
from inflight.kernels.cpu.library import use_instruction_set
from inflight.loading.load_errors import LoadError
from inflight.loading.saved.kv_identity import KV_DECISIVE, kv_namespace
from inflight.runner.block_io import PoolBlocks
from inflight.runner.pipeline import make_runner, placed

PROMPT = [(7 * n * n + 3 * n) % VOCAB for n in range(150)]
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, key_head_size=16, value_head_size=8, scaling=1.0)
# Options that change no byte of KV; what the others change is in the pool's layout and the model's facts.
IRRELEVANT = {
    *("admission", "async_scheduling", "chat_template", "chat_template_timeout", "check_on_load", "cpu_threads"),
    *("default_max_tokens", "disable_log_stats", "download_dir", "drain_timeout", "edf_default_timeout"),
    *("enable_prefix_caching", "enforce_eager", "engine_start_timeout", "engine_timeout", "exclude_input_in_output"),
    *("generation_config", "gpu_memory_utilization", "head_bits", "hf_overrides", "itl_target_ms", "kv_cache_memory"),
    *(
        "kv_events_config",
        "kv_listen",
        "kv_store_secret_file",
        "kv_tiers",
        "long_prefill_token_threshold",
        "max_bad_words",
        "max_input_bytes",
    ),
    *("max_cudagraph_capture_size", "max_logprobs", "max_long_partial_prefills", "max_model_len", "max_n"),
    *("max_name_bytes", "max_num_batched_tokens", "max_num_partial_prefills", "max_num_seqs", "max_pooled_inputs"),
    *("max_queue_size", "max_replays", "max_stop_bytes", "max_stop_strings", "max_stop_token_ids"),
    *("num_gpu_blocks_override", "otlp_traces_endpoint", "pooler_config", "preemption_mode", "preemption_victim"),
    *("priority_aging_seconds", "priority_classes", "python_executable", "scheduling_policy", "seed"),
    *("shared_step_rows", "shed_on_predicted_wait", "short_prompt_share", "sjf_aging_seconds", "spare_engine"),
    *("speculative_config", "step_trace", "stream_interval", "swap_space", "tenant_header", "tenants", "tokenizer"),
    *("tokenizer_revision", "trust_request_chat_template", "watermark", "wire_format"),
    *("enable_lora", "lora_allowed_paths", "lora_dtype", "max_cpu_loras", "max_lora_rank", "max_loras"),  # salts
}
IN_THE_FACTS = {"attention_backend", "device", "dtype", "model", "revision"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(make_checkpoint("llama", tmp_path_factory.mktemp("kv")))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that computes slowly, so that any load pays."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 1.0)
    torch.set_num_threads(1)


def engine(folder: Path | str, disk: Path, **options: Any) -> LLM:
    tiers = [{"type": "host", "size": "1MiB"}, {"type": "disk", "path": str(disk), "size": "64MiB"}]
    fixed = {"kv_cache_memory": "16MiB", "block_size": 4, "kv_tiers": tiers}
    return LLM(str(folder), dtype="float32", **{**fixed, **options})


def extents(disk: Path) -> list[Path]:
    """The files of a disk tier that are complete."""
    return [path for path in disk.rglob("*") if path.is_file() and len(path.name) == 32]


def outputs(llm: LLM, prompts: list[list[int]], count: int) -> list[tuple[list[int], int]]:
    """Tokens, and how many of the prompt's were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [(one.outputs[0].token_ids, one.num_cached_tokens) for one in found]


_KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"async_scheduling": True, "speculative_config": {"method": "suffix"}}),
    ("llama", {"attention_backend": "reference", "native_forward": False}),
    ("llama", {"kv_cache_dtype": "int8"}),
    ("llama", {"quantization": "int8"}),
    ("gemma2", {}),
    ("gpt2", {"block_size": 3}),
    ("qwen3_moe", {}),
]


@pytest.mark.parametrize(
    ("kind", "options"), [pytest.param(*one, marks=() if one is _KINDS[0] else pytest.mark.nightly) for one in _KINDS]
)
def test_a_conversation_returns_in_a_new_engine(tmp_path, kind, options):
    folder = make_checkpoint(kind, tmp_path)
    with engine(folder, tmp_path / "kv", **options) as llm:
        [(said, cached)] = outputs(llm, [PROMPT], 20)
        assert cached == 0
    turn = [*PROMPT, *said, 5, 6, 7]
    with engine(folder, tmp_path / "kv", **options) as llm:
        [(answer, cached)] = outputs(llm, [turn], 20)
    assert cached >= 128
    with LLM(folder, dtype="float32", kv_cache_memory="16MiB", **{"block_size": 4, **options}) as llm:
        assert [said, answer] == [tokens for tokens, _ in outputs(llm, [PROMPT, turn], 20)]
    if "kv_cache_dtype" not in options and "quantization" not in options:
        assert [said, answer] == greedy_reference(folder, [PROMPT, turn], [20, 20])


def test_what_ends_with_a_stop_token_is_kept_though_a_step_was_launched_ahead(tmp_path, folder):
    """No request follows that would collect that step."""
    with engine(folder, tmp_path / "other", async_scheduling=True) as llm:
        [(said, _)] = outputs(llm, [PROMPT], 40)
        stops = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[said[30]])
    with engine(folder, tmp_path / "kv", async_scheduling=True) as llm:
        [answer] = llm.generate([{"prompt_token_ids": PROMPT}], stops)
    ended = list(answer.outputs[0].token_ids)
    assert ended == said[: len(ended)] and len(ended) < 40
    with engine(folder, tmp_path / "kv", async_scheduling=True) as llm:
        [(_, cached)] = outputs(llm, [[*PROMPT, *ended, 5]], 1)
    assert cached == (len(PROMPT) + len(ended) - 1) // 4 * 4


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_has_not_ended_when_an_engine_is_closed_is_kept(tmp_path, folder, cancelled):
    """Or was cancelled, and had no turn since."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm = engine(folder, tmp_path, async_scheduling=True)
    [request] = llm.engine.submit([(None, PROMPT)], [params], lambda request: None)
    said = request.result.outputs[0].token_ids
    while len(said) < 20:
        llm.engine.step()
    if cancelled:
        llm.engine.abort_later(request)
    llm.close()
    with engine(folder, tmp_path) as llm:
        [(_, cached)] = outputs(llm, [[*PROMPT, *said, 5]], 1)
    assert cached == (len(PROMPT) + len(said) - 1) // 4 * 4


def test_a_step_that_fails_behind_the_last_request_fails_nothing(tmp_path, folder, caplog):
    """It was launched before the last token of the request was known, and its output goes nowhere."""
    with engine(folder, tmp_path, async_scheduling=True) as llm:
        [(said, _)] = outputs(llm, [PROMPT], 40)
        runner = llm.engine._runner
        collect = runner.collect

        def failing(ticket: Any) -> Any:
            if not llm.engine.has_open:
                raise RuntimeError("the device is lost")
            return collect(ticket)

        runner.collect = failing
        stops = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[said[30]])
        [answer] = llm.generate([{"prompt_token_ids": PROMPT}], stops)
        assert answer.finished and answer.outputs[0].token_ids == said[: said.index(said[30]) + 1]
        assert "KV tiers do not get all of its KV" in caplog.text
        runner.collect = collect
        [(again, _)] = outputs(llm, [PROMPT], 40)
        assert again == said


@pytest.mark.nightly
def test_an_engine_of_one_request_loads_too(tmp_path):
    """Its pool has room for loads beside the longest request."""
    folder = make_checkpoint("llama", tmp_path, max_position_embeddings=512)
    with engine(folder, tmp_path / "kv", max_num_seqs=1) as llm:
        [(said, _)] = outputs(llm, [PROMPT], 4)
    with engine(folder, tmp_path / "kv", max_num_seqs=1) as llm:
        [(again, cached)] = outputs(llm, [PROMPT], 4)
    assert again == said and cached >= 128


def test_the_pools_memory_is_provided_and_stays_as_it_is():
    caches = [CpuAttention().new_cache(512, 4, LayerSpec(4, 2, 32, 32, 1.0), torch.float32, torch.device("cpu"))]
    fill(caches)
    blocks = PoolBlocks(caches)
    before = bytes(blocks.copy(range(512)))
    blocks.map_pages()
    blocks.map_pages()
    for thread in threading.enumerate():
        if thread.name == "kv-pages":
            thread.join(60)
    assert bytes(blocks.copy(range(512))) == before
    stop = blocks._stop
    del blocks
    gc.collect()
    assert stop.value == 1  # a thread that is not through ends


def test_a_changed_byte_on_disk_is_computed(tmp_path, folder):
    with engine(folder, tmp_path) as llm:
        [(said, _)] = outputs(llm, [PROMPT], 4)
    *whole, part = sorted(extents(tmp_path), key=lambda path: -path.stat().st_size)
    assert len(whole) == 2 and part.stat().st_size < whole[1].stat().st_size
    kept = [path.read_bytes() for path in whole]
    for path, content in zip(whole, kept):
        changed = bytearray(content)
        changed[len(content) * 2 // 3] ^= 4
        path.write_bytes(changed)
    with engine(folder, tmp_path) as llm:
        assert outputs(llm, [PROMPT], 4) == [(said, 0)]
    assert [path.read_bytes() for path in whole] == kept  # dropped, and kept anew


@pytest.mark.nightly
def test_a_replayed_request_takes_prompt_and_output_from_a_tier(tmp_path, monkeypatch):
    """Its engine process was killed in the middle of its output."""
    monkeypatch.setattr(tier_admission, "_AGAIN", 1e-3)  # the extent at its end is never written
    folder = make_checkpoint("llama", tmp_path, max_position_embeddings=4096)
    prompt = PROMPT * 14
    tiers = [{"type": "disk", "path": str(tmp_path / "kv"), "size": "64MiB"}]
    options = {"model": folder, "dtype": "float32", "block_size": 4, "kv_tiers": tiers}
    said: list[int] = []
    dying = Worker(**options)
    try:
        assert isinstance(dying.receive(), EngineReady)
        dying.send(AddRequest(1, prompt, greedy(1000)))
        while len(said) < 80 or len(extents(tmp_path)) * 64 < len(prompt):
            said += tokens_of(dying.receive())
        dying.process.send_signal(signal.SIGKILL)
    finally:
        dying.close()
    config = placed(EngineConfig.from_dict({"device": "cpu", "kv_cache_memory": "16MiB", **options}))
    core = make_core(config, make_runner(config))
    given, cached = list(said), None
    assert core.add_request(AddRequest(2, prompt, greedy(len(given) + 20), output_token_ids=[given])) is None
    while core.has_work:
        message = core.step()
        said += tokens_of(message)
        cached = next((delta.num_cached_tokens for delta in message.deltas), None) if cached is None else cached
    core.info.tiers.close()
    assert said == greedy_reference(folder, [prompt], [len(given) + 20])[0]
    assert cached == len(prompt)  # and of the output what was kept, which `num_cached_tokens` does not count


def greedy(max_tokens: int) -> EngineParams:
    return EngineParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)


def tokens_of(message: StepMessage) -> list[int]:
    """Of the only request."""
    return [token for delta in message.deltas for token in delta.token_ids]


@pytest.mark.parametrize("kv_cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("backend", [ReferenceAttention(), CpuAttention()])
def test_a_block_is_all_bytes_of_its_keys_and_values(backend, kv_cache_dtype):
    spec = SPEC if kv_cache_dtype is None else LayerSpec(4, 2, 16, 8, 1.0, kv_cache_dtype=kv_cache_dtype)
    caches = [backend.new_cache(9, 16, spec, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    blocks = PoolBlocks(caches)
    assert blocks.bytes_per_block == 2 * 16 * spec.bytes_per_token(torch.bfloat16)
    fill(caches)
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]
    copied = blocks.copy([4, 5, 2])
    assert blocks.fill([4, 5, 2], lambda frames: b"".join(frames) == bytes(copied))
    for cache in caches:
        cache.key[[0, 1, 7]] = 0
        cache.value[[0, 1, 7]] = 0

    def read(frames):
        start = 0
        for frame in frames:
            frame[:] = copied[start : start + frame.nbytes]
            start += frame.nbytes
        return start == copied.nbytes == 3 * blocks.bytes_per_block

    assert blocks.fill([0, 1, 7], read)
    for cache, (key, value) in zip(caches, before):
        key[[0, 1, 7]], value[[0, 1, 7]] = key[[4, 5, 2]], value[[4, 5, 2]]
        assert torch.equal(cache.key, key) and torch.equal(cache.value, value)


def fill(caches: list[KVCache]) -> None:
    for index, cache in enumerate(caches):
        for part in (cache.key, cache.value):
            part.copy_(torch.randint(0, 100, part.shape, generator=torch.Generator().manual_seed(index)))


def namespace(folder: Path, backend: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> bytes:
    config = EngineConfig.from_dict({"model": str(folder), "device": "cpu", **options})
    size = config.block_size
    cache = (backend or ReferenceAttention()).new_cache(3, size, SPEC, dtype, torch.device("cpu"))
    return kv_namespace(config, "reference", str(dtype), [cache])


def test_the_namespace_is_what_decides_the_bytes_of_kv(folder, tmp_path):
    assert {*KV_DECISIVE} | IRRELEVANT | IN_THE_FACTS == set(EngineConfig.__struct_fields__)
    same = namespace(folder)
    copy = tmp_path / "under another name"
    shutil.copytree(folder, copy)
    assert namespace(copy, cpu_threads=2, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=77) == same
    others = [
        namespace(folder, block_size=8),
        namespace(folder, kv_cache_dtype="int8"),
        namespace(folder, quantization="int8"),
        namespace(folder, native_forward=False),
        namespace(folder, trust_remote_code=True),
        namespace(folder, load_format="dummy"),
        namespace(folder, dtype=torch.bfloat16),
        namespace(folder, CpuAttention()),
    ]
    tensors = load_file(copy / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name].view(torch.uint8).flatten()[5] ^= 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    others.append(namespace(copy))
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("10000.0", "10001.0"))
    others.append(namespace(copy))
    (copy / "modeling.py").write_text("")
    others.append(namespace(copy))
    try:
        assert use_instruction_set("portable")
        others.append(namespace(folder))
    finally:
        use_instruction_set("")
    assert len({same, *others}) == 1 + len(others)


def test_scales_of_the_pool_belong_to_the_namespace(folder):
    config = EngineConfig.from_dict({"model": str(folder), "device": "cpu"})
    key = torch.zeros(1, 4, 2, 8)
    found = {
        kv_namespace(config, "gpu", "bfloat16", [KVCache(key, key.clone(), key_scale=scale, value_scale=scale)])
        for scale in (torch.ones(2), torch.tensor([1.0, 1.5]))
    }
    assert len(found) == 2


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"kv_store_secret_file": "nowhere"}, ConfigError, "nowhere'.*cannot be read"),
        ({"kv_store_secret_file": "short"}, ConfigError, "has 5 bytes: a secret has 16 to 4096"),
        ({"kv_tiers": [], "kv_listen": "127.0.0.1:7090"}, ConfigError, "kv_listen lets others read host memory: add"),
        ({"kv_listen": "0.0.0.0:7090"}, ConfigError, "kv_listen='0.0.0.0:7090' is not on this machine's loopback, so"),
        ({"kv_listen": "kv.local:7090"}, ConfigError, "is not on this machine's loopback, so it needs kv_store_secret"),
        (
            {"kv_listen": "192.0.2.1:7090", "kv_store_secret_file": "long"},
            ConfigError,
            "kv_listen: cannot listen on 192.0.2.1, port 7090: .*; give an address of this machine",
        ),
        ({"kv_listen": "127.0.0.1:70900"}, ConfigError, "kv_listen='127.0.0.1:70900' is not like 10.0.0.5:7090"),
        (
            {"kv_tiers": [{"type": "peer", "url": "tcp://10.0.0.5:7090"}]},
            ConfigError,
            r"kv_tiers\[0\].url='tcp://10.*so",
        ),
        ({"kv_tiers": [{"type": "peer", "url": "tcp://[::1]:70900"}]}, ConfigError, "is not like tcp://10.0.0.5:7090"),
        (
            {"kv_tiers": [{"type": "peer", "url": "tcp://[::1]:7090", "write": "second"}]},
            ConfigError,
            r'kv_tiers\[0\]: type="peer" is only read; remove write',
        ),
        ({"enable_prefix_caching": False}, ConfigError, "kv_tiers with enable_prefix_caching=false"),
    ],
)
def test_tiers_that_cannot_be_used_are_refused(folder, tmp_path, monkeypatch, options, error, says):
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short\n")
    Path("long").write_text("long" * 8)
    with pytest.raises(error, match=says):
        engine(folder, tmp_path, **options)


def test_host_memory_has_no_other_writer(tmp_path, folder):
    """So who waits for another engine's KV does not ask it again."""
    tiers = [{"type": "host", "size": "1MiB"}, {"type": "disk", "path": str(tmp_path), "size": "1MiB"}]
    options = {"model": str(folder), "device": "cpu", "kv_cache_memory": "1MiB", "kv_tiers": tiers}
    config = placed(EngineConfig.from_dict(options))
    made = make_core(config, make_runner(config)).info.tiers
    assert [tier.is_shared for tier in made.tiers] == [False, True]
    made.close()


def test_code_of_another_repository_is_refused(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("{", '{"auto_map": {"AutoConfig": "a/b--c.D"},', 1))
    with pytest.raises(LoadError, match="copy the code into its folder"):
        namespace(copy, trust_remote_code=True)
    namespace(copy)  # transformers' own class, which runs none of it
