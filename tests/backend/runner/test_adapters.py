"""Adapters: the tokens of merged weights, bits that no neighbour changes, and no prefix of another adapter."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import attached, make_adapter, merged_checkpoint
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from nightly import nightly_but
from offline import make_config, make_core, run, tokens
from pooled import expected_vector, pooled, vectors_of
from transformers import AutoModelForCausalLM

from inflight.adapters.spec import describe_adapter
from inflight.config import ConfigError
from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.pooling import Pooling
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu.library import use_instruction_set
from inflight.loading.forward.native_decoder import NativeDecoder
from inflight.runner import adapters as table_module
from inflight.runner.adapter_loader import LoaderPace, LoaderThread
from inflight.runner.pipeline import make_runner

GREEDY = dict(temperature=0.0, ignore_eos=True, seed=0)

# Adapters of many kinds; the targets are the last names of their layers.
KINDS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "some layers": dict(targets=["q_proj", "v_proj", "qkv_proj", "down_proj", "c_fc", "fc2"]),
    "rslora": dict(use_rslora=True, rank=8),
    "ranks and alphas of their own": dict(
        rank_pattern={"q_proj": 3, r"layers\.1\..*down_proj": 7, "qkv_proj": 5},
        alpha_pattern={"^model.layers.0.self_attn.o_proj": 11.0, "up_proj": 2.5},
    ),
    "one block": dict(layers_to_transform=[1]),
    "a pattern": dict(targets=["q_proj", "gate_proj", "gate_up_proj"], target_modules=r".*\.(q|gate|gate_up)_proj"),
}
NATIVE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "smollm3")
OTHERS = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "opt",
    "phi",
    "starcoder2",
    "cohere",
    "olmo2",
    "mixtral",
    "gpt_neox",
    "stablelm",
)
# Each architecture, and each kind more than once.
IN_SHORT = [
    ("llama", "ranks and alphas of their own"),
    ("qwen2", "some layers"),
    ("qwen3", "rslora"),
    ("mistral", "a pattern"),
    ("phi3", "all layers"),
    ("granite", "one block"),
    ("smollm3", "ranks and alphas of their own"),
    ("gemma2", "a pattern"),
    ("gemma3_text", "ranks and alphas of their own"),
    ("gpt2", "all layers"),
    ("opt", "some layers"),
    ("phi", "rslora"),
    ("starcoder2", "one block"),
    ("cohere", "all layers"),
    ("olmo2", "a pattern"),
    ("mixtral", "rslora"),
    ("gpt_neox", "all layers"),
]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def eight(llama: str, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    folder, kinds = tmp_path_factory.mktemp("eight"), list(KINDS.values())
    return [
        make_adapter(folder / f"a{i}", llama, seed=i, **{"rank": 1 + 2 * i, "strength": 1.5, **kinds[i % len(kinds)]})
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def merged(llama: str, eight: list[AdapterRef], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the first two."""
    folder = tmp_path_factory.mktemp("merged")
    return [merged_checkpoint(llama, ref, folder / ref.name) for ref in eight[:2]]


@pytest.mark.parametrize("case", nightly_but(IN_SHORT, [(name, kind) for name in (*NATIVE, *OTHERS) for kind in KINDS]))
def test_tokens_are_those_of_merged_weights(case: tuple[str, str], tmp_path: Path) -> None:
    model_type, kind = case
    if "gpt2" in model_type and kind in ("one block", "a pattern"):
        pytest.skip("its layers have other names")
    path = make_checkpoint(model_type, tmp_path, **({"num_hidden_layers": 2} if model_type == "gemma3_text" else {}))
    try:
        ref = make_adapter(tmp_path / "adapter", path, **{"strength": 1.0, **KINDS[kind]})
    except ValueError as error:
        if "1 to" in str(error):
            pytest.skip("it has no such layers")
        raise
    prompts, counts = [prompt_of(n, seed=n) for n in (3, 40, 70)], [12, 12, 12]
    wanted = greedy_reference(merged_checkpoint(path, ref, tmp_path / "merged"), prompts, counts)
    base = greedy_reference(path, prompts, counts)
    assert all(one != other for one, other in zip(wanted, base))
    core = make_core(path, enable_lora=True, block_size=5, max_num_batched_tokens=48, max_num_seqs=4)
    assert isinstance(core.runner.model, NativeDecoder) == (model_type in NATIVE)  # type: ignore[attr-defined]
    params = [SamplingParams(max_tokens=12, **GREEDY)] * 6
    deltas = run(core, prompts * 2, params, stagger=1, attached=[attached(ref)] * 3 + [None] * 3)
    assert [tokens(deltas[i, 0]) for i in range(6)] == wanted + base


def results(core: EngineCore, refs: list[AdapterRef | None], together: bool = True) -> list[Any]:
    """Tokens and log probabilities of one request for each, in one batch or each alone."""
    prompts = [prompt_of(5 + 7 * i, seed=i) for i in range(len(refs))]
    params = [SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=2, **GREEDY)] * len(refs)
    own = [attached(ref) for ref in refs]
    if together:
        deltas = run(core, prompts, params, attached=own)
        found = [deltas[i, 0] for i in range(len(refs))]
    else:
        found = [run(core, [prompts[i]], [params[i]], attached=[own[i]])[0, 0] for i in range(len(refs))]
    return [
        (
            tokens(deltas),
            [each for delta in deltas for each in delta.logprobs or ()],
            [each for delta in deltas for each in delta.prompt_logprobs or ()],
        )
        for deltas in found
    ]


@pytest.mark.parametrize(
    ("dtype", "isa"),
    [
        ("float32", ""),
        ("bfloat16", ""),
        *(
            pytest.param(dtype, isa, marks=pytest.mark.nightly)
            for dtype in ("float32", "bfloat16", "float16")
            for isa in ("avx512vnni", "avx512", "avx2", "portable")
        ),
    ],
)
def test_no_neighbour_changes_a_bit(llama: str, eight: list[AdapterRef], dtype: str, isa: str) -> None:
    """Eight adapters and the checkpoint alone in one ragged batch; and an engine without LoRA."""
    if not use_instruction_set(isa):
        pytest.skip(f"no {isa}")
    try:
        options: dict[str, Any] = dict(enable_lora=True, dtype=dtype, max_num_batched_tokens=37, block_size=4)
        refs = [None, *eight, None, eight[0], None]
        core = make_core(llama, enable_prefix_caching=False, **options)
        together = results(core, refs)
        assert together == results(core, refs, together=False)
        plain = make_core(llama, dtype=dtype, enable_prefix_caching=False)
        base = results(plain, [None] * len(refs))
        own = [i for i, ref in enumerate(refs) if ref is None]
        assert [together[i] for i in own] == [base[i] for i in own]
        assert all(together[i] != base[i] for i in range(len(refs)) if i not in own)
    finally:
        use_instruction_set("")


def test_layers_that_share_half_a_panel_and_outputs_beyond_whole_panels(tmp_path: Path) -> None:
    sizes = dict(num_key_value_heads=1, intermediate_size=41, hidden_size=40, num_attention_heads=5)
    path = make_checkpoint("llama", tmp_path, **sizes)
    ref = make_adapter(tmp_path / "a", path, strength=1.0, rank_pattern={"k_proj": 1, "up_proj": 9})
    prompts = [prompt_of(n, seed=n) for n in (3, 50)]
    wanted = greedy_reference(merged_checkpoint(path, ref, tmp_path / "merged"), prompts, [12, 12])
    for isa in ("", "avx2", "portable"):
        if use_instruction_set(isa):
            core = make_core(path, enable_lora=True)
            assert isinstance(core.runner.model, NativeDecoder)  # type: ignore[attr-defined]
            deltas = run(core, prompts, [SamplingParams(max_tokens=12, **GREEDY)] * 2, attached=[attached(ref)] * 2)
            use_instruction_set("")
            assert [tokens(deltas[i, 0]) for i in range(2)] == wanted, isa


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": dict(max_num_batched_tokens=7, max_num_seqs=3),
    "preempting": dict(block_size=4, num_gpu_blocks_override=64, max_num_seqs=64),
    "swapping": dict(block_size=4, num_gpu_blocks_override=64, max_num_seqs=64, swap_space=1, preemption_mode="swap"),
    "launched ahead": dict(async_scheduling=True),
    "drafts of text": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 4}),
    "drafts of a model": dict(
        speculative_config={"model": "SELF", "num_speculative_tokens": 3, "kv_cache_memory": "8MiB"}
    ),
    "two in memory": dict(max_cpu_loras=2),
    "through transformers": dict(native_forward=False),
}


@pytest.mark.parametrize("setting", nightly_but(["preempting", "drafts of a model", "two in memory"], SETTINGS))
def test_any_setting_gives_the_tokens_of_merged_weights(
    llama: str, eight: list[AdapterRef], merged: list[str], setting: str
) -> None:
    options = dict(SETTINGS[setting])
    if setting == "drafts of a model":
        options["speculative_config"] = {**options["speculative_config"], "model": llama}
    prompts = [prompt_of(n, seed=n) for n in (40, 21, 33, 60, 8, 75)]
    if setting == "drafts of text":
        prompts = [2 * prompt for prompt in prompts]  # their ends have been there before, whatever the model answers
    counts = [30, 24, 16, 40, 30, 12]
    wanted = []
    for index, path in enumerate([*merged, llama]):
        wanted += greedy_reference(path, prompts[index::3], counts[index::3])
    core = make_core(llama, enable_lora=True, **options)
    refs = [eight[0], eight[1], None]
    assert core.info.adapters is not None
    for ref in eight[:2]:
        core.info.adapters.load(ref).result(60)  # so that all run at the same time, however busy the machine is
    params = [SamplingParams(max_tokens=count, **GREEDY) for count in counts]
    deltas = run(core, prompts, params, stagger=2, attached=[attached(refs[i % 3]) for i in range(6)])
    assert [tokens(deltas[i, 0]) for index in range(3) for i in range(index, 6, 3)] == wanted
    if setting in ("preempting", "swapping"):
        assert core.scheduler.num_preempted_total > 0
    if setting.startswith("drafts"):
        assert core.scheduler.policies.draft_counts.drafts > 0


def test_a_prefix_belongs_to_one_adapter(llama: str, eight: list[AdapterRef], tmp_path: Path) -> None:
    core = make_core(llama, enable_lora=True)
    prompt = [prompt_of(100)]
    params = [SamplingParams(max_tokens=2, **GREEDY)]
    same = describe_adapter(shutil.copytree(eight[0].path, tmp_path / "same"), "another name", 64)
    for ref, hits in ((None, 0), (eight[0], 0), (eight[1], 0), (None, 96), (eight[0], 96), (same, 96), (eight[1], 96)):
        before = core.pool.num_prefix_hits
        run(core, prompt, params, attached=[attached(ref)])
        assert core.pool.num_prefix_hits - before == hits, ref


def test_the_sequences_of_one_request(llama: str, eight: list[AdapterRef], merged: list[str]) -> None:
    """n > 1, sampled; a merged checkpoint has the same seeds."""
    params = [
        SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=15, ignore_eos=True),
        *[SamplingParams(n=2, max_tokens=9, **GREEDY)] * 2,
    ]
    prompts = [prompt_of(30), prompt_of(30), prompt_of(12)]
    core = make_core(llama, enable_lora=True)
    found = run(core, prompts, params, attached=[attached(eight[0])] * 3)
    wanted = run(make_core(merged[0]), prompts, params)
    assert {key: tokens(deltas) for key, deltas in found.items()} == {key: tokens(one) for key, one in wanted.items()}


@pytest.mark.parametrize("native", [True, False])
def test_vectors(llama: str, eight: list[AdapterRef], merged: list[str], native: bool) -> None:
    core = make_core(llama, enable_lora=True, max_num_batched_tokens=16, native_forward=native)
    added = []
    for i, kind in enumerate(("last", "mean", "cls")):
        asked = Attached(pooling=Pooling("embed", kind), adapter=eight[0])
        added += [
            pooled(10 + i, prompt_of(30), kind),
            AddRequest(i, prompt_of(30), pooled(0, [1]).params, attached=asked),
        ]
    vectors, _ = vectors_of(core, added)
    for path, first in ((merged[0], 0), (llama, 10)):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for i, kind in enumerate(("last", "mean", "cls")):
            np.testing.assert_allclose(
                vectors[first + i], expected_vector(model, prompt_of(30), kind), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_codes_leave_the_delta_unquantised(llama: str, eight: list[AdapterRef], quantization: str) -> None:
    """The adapter moves the logits of weights in codes as it moves those of plain ones."""

    def logprobs(refs: list[AdapterRef | None], **options: Any) -> np.ndarray:
        core = make_core(llama, max_logprobs=-1, **options)
        params = SamplingParams(max_tokens=1, logprobs=VOCAB, **GREEDY)
        deltas = run(core, [prompt_of(20)] * len(refs), [params] * len(refs), attached=[attached(one) for one in refs])
        places = [next(iter(deltas[i, 0][0].logprobs or ())) for i in range(len(refs))]
        rows = [{token: logprob for token, logprob, _ in place} for place in places]
        return np.array([[row[token] for token in range(VOCAB)] for row in rows])

    plain = logprobs([None, eight[0]], enable_lora=True)
    coded = logprobs([None, eight[0]], enable_lora=True, quantization=quantization)
    assert np.array_equal(coded[0], logprobs([None], quantization=quantization)[0])
    moved, wanted = coded[1] - coded[0], plain[1] - plain[0]
    assert np.corrcoef(moved, wanted)[0, 1] > 0.9


def short(request_id: int, ref: AdapterRef | None) -> AddRequest:
    return AddRequest(request_id, prompt_of(9), SamplingParams(max_tokens=9, **GREEDY), attached=attached(ref))


def steps_until_idle(core: EngineCore) -> tuple[dict[int, list[int]], dict[int, str]]:
    found: dict[int, list[int]] = {}
    failed: dict[int, str] = {}
    while core.has_work:
        message = core.step()
        check_core(core)
        failed.update({failure.request_id: failure.message for failure in message.failed})
        for delta in message.deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found, failed


def test_a_damaged_adapter_fails_its_own_requests(llama: str, eight: list[AdapterRef], tmp_path: Path) -> None:
    other = make_checkpoint("llama", tmp_path / "other", hidden_size=64)
    wide = make_adapter(tmp_path / "wide", other)
    nan = make_adapter(tmp_path / "nan", llama, strength=float("inf"))
    elsewhere = make_adapter(tmp_path / "elsewhere", llama, prefix="base_model.model.language_model.")
    changed = make_adapter(tmp_path / "changed", llama)
    make_adapter(tmp_path / "changed", llama, seed=7)
    gone = AdapterRef("gone", "0" * 32, str(tmp_path / "gone"), 4)
    large = AdapterRef("large", eight[7].id, eight[7].path, 4)
    core = make_core(llama, enable_lora=True, max_lora_rank=14)
    plain = steps_of(core, 0, None)
    for i, ref in enumerate([None, wide, nan, elsewhere, changed, gone, large]):
        assert core.add_request(short(i, ref)) is None
    found, failed = steps_until_idle(core)
    assert found == {0: plain}
    said = [
        r"'wide': base_model\.model\.model\.layers\.0\.\S+ has shape \[64, 4\], and the model's layer takes \[32, 4\]",
        r"'nan': \S+ contains NaN, infinity",
        r"'elsewhere': base_model\.model\.language_model\.\S+ is of no layer of the model",
        r"'changed': its files have changed",
        r"'gone': \S+ has no adapter_config.json",
        r"'large': \S+ has rank 15: at most max_lora_rank=14",
    ]
    for i, message in enumerate(said, 1):
        assert failed[i].startswith("adapter "), failed[i]
        assert "\n" not in failed[i]
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(failed[i])


def steps_of(core: EngineCore, request_id: int, ref: AdapterRef | None) -> list[int]:
    assert core.add_request(short(request_id, ref)) is None
    return steps_until_idle(core)[0][request_id]


def test_experts_and_heads_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", tmp_path)
    ref = make_adapter(tmp_path / "a", path)
    core = make_core(path, enable_lora=True)
    layers = core.info.adapters._model.layers  # type: ignore[union-attr]
    assert layers and all(name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")) for name in layers)
    assert steps_of(core, 1, ref)


def test_without_enable_lora_an_adapter_is_refused(llama: str, eight: list[AdapterRef]) -> None:
    refused = make_core(llama).add_request(AddRequest(1, [1], SamplingParams(), attached=attached(eight[0])))
    assert refused is not None and refused.code == "INVALID_ARG" and '"enable_lora": true' in refused.message


def test_a_row_without_its_adapter_fails_alone(
    llama: str, eight: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which admission prevents: no row runs with the checkpoint in place of its adapter."""
    core = make_core(llama, enable_lora=True)
    plain = steps_of(core, 5, None)
    monkeypatch.setattr(core.info.adapters, "get", lambda adapter_id: None)
    for i, ref in enumerate([None, eight[0], None]):
        assert core.add_request(short(i, ref)) is None
    found, failed = steps_until_idle(core)
    assert found == {0: plain, 2: plain}
    assert list(failed) == [1] and "the adapter of this request is not in memory" in failed[1]


def test_options_that_cannot_be_met(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"lora_dtype='bfloat16': .* which is 'float32'"):
        make_runner(make_config(llama, enable_lora=True, lora_dtype="bfloat16"))


def test_others_run_and_an_abort_ends_while_an_adapter_is_loaded(
    llama: str, eight: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, begun = threading.Event(), threading.Event()
    read = table_module.read_adapter

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert goes.wait(60)
        return read(*arguments)

    monkeypatch.setattr(table_module, "read_adapter", slow)
    core = make_core(llama, enable_lora=True)
    for request_id, ref in ((1, eight[0]), (2, eight[0]), (3, None), (4, eight[1])):
        core.add_request(short(request_id, ref))
    assert begun.wait(60)
    found: dict[int, int] = {}
    while found.get(3, 0) < 9:
        for delta in core.step().deltas:
            found[delta.request_id] = found.get(delta.request_id, 0) + len(delta.token_ids)
    assert list(found) == [3] and core.only_holds
    core.abort(1)
    goes.set()
    rest, failed = steps_until_idle(core)
    assert sorted(rest) == [2, 4] and not failed
    assert rest[2] == steps_of(make_core(llama, enable_lora=True), 2, eight[0])


@pytest.mark.parametrize("native", [True, False], ids=["native", "modules"])
def test_others_run_and_an_abort_ends_between_two_slices_of_a_load(
    llama: str, eight: list[AdapterRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Of two adapters, the second one with infinity in its last matrix; each slice waits until others have a token."""
    last = make_adapter(tmp_path / "last", llama, strength=float("inf"), targets=["down_proj"], layers_to_transform=[1])
    goes, begun, count = threading.Semaphore(0), threading.Event(), [0]

    def pause(loader: LoaderThread) -> None:
        count[0] += 1
        begun.set()
        assert goes.acquire(timeout=60)

    monkeypatch.setattr(LoaderThread, "pause", pause)
    path = llama if native else make_checkpoint("gemma2", tmp_path / "gemma2")
    first = eight[0] if native else make_adapter(tmp_path / "first", path)
    core = make_core(path, enable_lora=True)
    assert isinstance(core.runner.model, NativeDecoder) == native  # type: ignore[attr-defined]
    wanted = [(1, first), (2, first), (3, None), *([(4, last)] if native else [])]
    for request_id, ref in wanted:
        core.add_request(short(request_id, ref))
    assert begun.wait(60)
    found: dict[int, int] = {}
    while found.get(3, 0) < 9:
        goes.release()
        for delta in core.step().deltas:
            found[delta.request_id] = found.get(delta.request_id, 0) + len(delta.token_ids)
    assert list(found) == [3] and core.only_holds, "the load has more slices than the request has tokens"
    core.abort(1)
    goes.release(10_000)
    rest, failed = steps_until_idle(core)
    assert list(rest) == [2] and count[0] > 9
    assert list(failed) == ([4] if native else [])
    assert not native or ("'last': " in failed[4] and "contains NaN, infinity" in failed[4] and "\n" not in failed[4])


def test_each_step_sets_the_pace_of_loads(llama: str, eight: list[AdapterRef], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, too."""
    steps: list[tuple[float, int]] = []
    monkeypatch.setattr(LoaderPace, "step_done", lambda pace, seconds, running: steps.append((seconds, running)))
    core = make_core(llama, enable_lora=True)
    for i in range(2):
        assert core.add_request(short(i, None)) is None
    message = core.step()
    assert steps == [(message.stats.step_seconds, 2)]

    def failing(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(core.runner.forward, "run", failing)  # type: ignore[attr-defined]
    message = core.step()
    assert len(message.failed) == 2 and len(steps) == 2
    seconds, running = steps[1]
    assert seconds > 0 and running == 2
