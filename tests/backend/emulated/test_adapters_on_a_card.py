"""Adapters on an emulated card: the tokens of merged weights, by graphs and eager steps, without waits of the host."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import attached, make_adapter, merged_checkpoint
from card_rig import card, card_core, functions_as_kernels, num_replays, without_waits
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from emulated_card import Card, emulated_card
from every_kind import prompt_of
from lora_slots import lora_slots
from offline import make_core, run, tokens
from pooled import pooled, vectors_of
from torch import Tensor, nn

from inflight.adapters.tensor_header import Matrix, Pair
from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.pooling import Pooling
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.adapter_weights import Matrices
from inflight.loading.forward import device_adapters
from inflight.loading.forward.device_adapters import DeviceAdapters
from inflight.loading.load_errors import LoadError
from inflight.ops.lora import LoraSlots, ReferenceLora

__all__ = ["card"]

GREEDY = dict(temperature=0.0, ignore_eos=True, seed=0)
LENGTHS = (3, 20, 9, 14, 31, 6)
COUNT = 8
KINDS = (0, 3, 1, 2, 3, 0)  # the adapter of each request; 3: none
TARGETS = [None, ["q_proj", "v_proj", "down_proj"], ["o_proj", "up_proj"]]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def refs(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(folder / f"a{i}", checkpoint, own, seed=i, rank=4 + 6 * i, strength=1.5)
        for i, own in enumerate(TARGETS)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: str, refs: list[AdapterRef], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of each request, by the merged weights of its adapter."""
    folder = tmp_path_factory.mktemp("merged")
    paths = [*(merged_checkpoint(checkpoint, ref, folder / ref.name) for ref in refs), checkpoint]
    found: dict[int, list[int]] = {}
    for kind, path in enumerate(paths):
        own = [i for i, chosen in enumerate(KINDS) if chosen == kind]
        found |= zip(own, greedy_reference(path, [prompts()[i] for i in own], [COUNT] * len(own)))
    return [found[i] for i in range(len(KINDS))]


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


@pytest.fixture
def restless_card() -> Iterator[Card]:
    """It also works at random moments."""
    with emulated_card(rng=random.Random(3)) as made:
        yield made


def prompts() -> list[list[int]]:
    return [prompt_of(i, length) for i, length in enumerate(LENGTHS)]


def lora_core(path: str, refs: list[AdapterRef], **options: Any) -> EngineCore:
    """The adapters are in host memory, so that requests start in the order of their arrival."""
    core = card_core(path, enable_lora=True, **options)
    assert core.info.adapters is not None and core.info.adapters._pace is None, "steps compute on no cores"
    for ref in refs:
        core.info.adapters.load(ref).result(60)
    return without_waits(core)


def generated(core: EngineCore, chosen: list[AdapterRef | None], **params: Any) -> list[Any]:
    """Tokens and log probabilities."""
    params = dict(max_tokens=COUNT, **GREEDY) | params
    sampling = [SamplingParams(**params)] * len(chosen)
    deltas = run(core, prompts()[: len(chosen)], sampling, 1, attached=[attached(ref) for ref in chosen])
    found = [deltas[i, 0] for i in range(len(chosen))]
    return [(tokens(one), [each for delta in one for each in delta.logprobs or ()]) for one in found]


SETTINGS: dict[str, dict[str, Any]] = {
    "fewer slots than adapters, checked at load": dict(max_loras=2, max_num_seqs=3, check_on_load=True),
    "graphs of prompts": dict(max_cudagraph_capture_size=16, max_loras=2),
    "graphs of decodes": dict(max_loras=3),
    "one slot": dict(max_loras=1),
    "two in host memory": dict(max_loras=1, max_cpu_loras=2, enforce_eager=True),
    "eager": dict(enforce_eager=True, max_loras=3),
    "one step at a time": dict(async_scheduling=False, max_loras=2),
    "preempted": dict(num_gpu_blocks_override=16, block_size=4, max_loras=2),
    "swapped": dict(num_gpu_blocks_override=16, block_size=4, swap_space="1MiB", preemption_mode="swap", max_loras=3),
    "drafts": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, max_loras=2),
    "module by module": dict(native_forward=False, enforce_eager=True, max_loras=3),
}


@pytest.mark.parametrize(
    "setting", [next(iter(SETTINGS)), *(pytest.param(name, marks=pytest.mark.nightly) for name in list(SETTINGS)[1:])]
)
def test_tokens_are_those_of_merged_weights(
    checkpoint: str, refs: list[AdapterRef], expected: list[list[int]], restless_card: Card, setting: str
) -> None:
    """Adapters and none in a batch, whose requests arrive one after another."""
    core = lora_core(checkpoint, refs, **SETTINGS[setting])
    chosen: list[AdapterRef | None] = [*refs, None]
    assert [found for found, _ in generated(core, [chosen[kind] for kind in KINDS])] == expected
    if setting in ("preempted", "swapped"):
        assert core.scheduler.num_preempted_total > 0
    if "enforce_eager" not in SETTINGS[setting]:
        assert any(count for size, count in num_replays(core).items() if size.adapted)


def test_rows_without_adapters_are_as_without_lora(
    checkpoint: str,
    refs: list[AdapterRef],
    card: Card,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To the last bit, beside others; and a step without any launches nothing for them, from a graph or eagerly.

    The plan of the memory counts the slots, and every graph is there twice.
    """
    options: dict[str, Any] = dict(max_num_seqs=2, kv_cache_memory=None, num_gpu_blocks_override=32)
    params = dict(logprobs=3, max_tokens=4)
    base = generated(card_core(checkpoint, **options), [None] * 2, **params)
    caplog.set_level("INFO")
    core = lora_core(checkpoint, refs[:1], max_loras=3, max_lora_rank=20, **options)
    mixed = generated(core, [None, refs[0]], **params)
    assert mixed[0] == base[0] and mixed[1] != base[1]
    before = num_replays(core)
    monkeypatch.setattr(ReferenceLora, "add", lambda *args: pytest.fail("launched for an adapter"))
    assert generated(core, [None] * 2, **params) == base
    after = num_replays(core)
    assert all(after[size] == before[size] for size in after if size.adapted)
    assert sum(after.values()) > sum(before.values())
    for adapted in (False, True):
        assert sorted(size.tokens for size in after if size.adapted == adapted) == [1, 2]
    model: Any = core.info.adapters._model  # type: ignore[union-attr]
    needed = 3 * 32 * 4 * sum(map(sum, model.layers.values()))
    assert needed <= model.nbytes < 1.1 * needed
    (plan,) = [text for text in caplog.messages if text.startswith("memory ")]
    assert f"adapters {model.nbytes / 2**10:.2f} KiB" in plan
    assert not card.launched_at_once


@pytest.mark.nightly
def test_requests_that_are_aborted_leave_their_slots_to_others(
    checkpoint: str, refs: list[AdapterRef], expected: list[list[int]], restless_card: Card
) -> None:
    """Aborts come while steps with the adapter run, and while its copy is queued."""
    core = lora_core(checkpoint, refs, max_loras=1, max_num_seqs=4, max_cudagraph_capture_size=16)
    chosen, rng = [*refs, None], random.Random(1)
    for first in range(0, 300, 100):
        for i, kind in enumerate(KINDS):
            params = SamplingParams(max_tokens=COUNT, **GREEDY)
            message = AddRequest(first + i, prompts()[i], params, attached=attached(chosen[kind]))
            assert core.add_request(message) is None
        open_ids, found = {first + i for i in range(len(KINDS))}, dict[int, list[int]]()
        while core.has_work:
            output = core.step()
            assert not output.failed
            check_core(core)
            for delta in output.deltas:
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    open_ids.discard(delta.request_id)
            if open_ids and rng.random() < 0.12:
                core.abort(gone := rng.choice(sorted(open_ids)))
                open_ids.discard(gone)
        assert any(len(one) == COUNT for one in found.values()) and len(found) > 2
        for request_id, one in found.items():
            assert one == expected[request_id - first][: len(one)]


def sampled_and_pooled(core: EngineCore, refs: list[AdapterRef]) -> tuple[dict[Any, list[int]], dict[int, Any]]:
    params = [SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=6, ignore_eos=True)] * 2
    deltas = run(core, prompts()[:2], params, attached=[attached(ref) for ref in refs[:2]])
    kinds = [(kind, ref) for kind in ("last", "mean") for ref in (refs[0], None)]
    asked = [
        AddRequest(
            i, prompt_of(i, 21), pooled(0, [1]).params, attached=Attached(pooling=Pooling("embed", kind), adapter=ref)
        )
        for i, (kind, ref) in enumerate(kinds)
    ]
    return {key: tokens(one) for key, one in deltas.items()}, vectors_of(core, asked)[0]


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str, refs: list[AdapterRef]) -> Any:
    limits = dict(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)
    return sampled_and_pooled(make_core(checkpoint, enable_lora=True, **limits), refs)


@pytest.mark.nightly
def test_the_sequences_of_one_request_and_vectors(
    checkpoint: str, refs: list[AdapterRef], on_the_cpu: Any, card: Card
) -> None:
    found, vectors = sampled_and_pooled(lora_core(checkpoint, refs, max_loras=2), refs)
    assert found == on_the_cpu[0]
    for request_id, vector in on_the_cpu[1].items():
        np.testing.assert_allclose(vectors[request_id], vector, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_weights_in_four_bits_leave_the_delta_unquantised(tmp_path: Path, card: Card) -> None:
    """The adapter moves the logits of weights in codes as it moves those of plain ones."""
    path = make_checkpoint("llama", tmp_path, head_dim=32, intermediate_size=64, num_hidden_layers=1)
    ref = make_adapter(tmp_path / "adapter", path, strength=1.0)

    def logprobs(**options: Any) -> np.ndarray:
        core = lora_core(path, [ref], dtype="float16", enforce_eager=True, max_loras=2, max_logprobs=-1, **options)
        rows = [found[0] for _, found in generated(core, [None, ref], max_tokens=1, logprobs=VOCAB)]
        places = [{token: logprob for token, logprob, _ in row} for row in rows]
        return np.array([[place[token] for token in range(VOCAB)] for place in places])

    plain, coded = logprobs(), logprobs(quantization="int4")
    moved, wanted = coded[1] - coded[0], plain[1] - plain[0]
    assert np.corrcoef(moved, wanted)[0, 1] > 0.9 and not np.array_equal(coded, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_loras=2**18, enforce_eager=True), "262144 adapters of rank 16 take .* lower max_loras"),
        (dict(quantization="fp8", dtype="bfloat16", enforce_eager=True), "not served with weights in fp8"),
    ],
)
def test_what_is_refused(checkpoint: str, card: Card, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        card_core(checkpoint, enable_lora=True, **options)


class Tiny(nn.Module):
    """Two layers; the second one is called with some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(8, 4, bias=False), nn.Linear(4, 4)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        y = self.all(x)
        self.some(y[:1])
        return y


def tiny_adapters(slots: int) -> tuple[Tiny, DeviceAdapters]:
    with torch.inference_mode():
        model = Tiny().to(CUDA)

        def trial() -> int:
            model(torch.zeros(3, 8, device=CUDA))
            return 3

        return model, DeviceAdapters(model, torch.float32, CUDA, slots, 2, 16, trial)


def matrices(value: float) -> Mapping[str, Matrices]:
    """They add 8 * value to each output of ones."""
    data = np.array([value] * 8 + [1.0] * 4, np.float32).tobytes()
    pair = Pair(Matrix("a", "F32", (1, 8), 0, 32), Matrix("b", "F32", (4, 1), 32, 48))
    return {"all": Matrices("one", pair, 1.0, bytearray(data))}


def no_pause() -> None:
    """For `AdaptedModel.pack`."""


@torch.inference_mode()
def added(model: Tiny, adapters: DeviceAdapters, rows: list[Any], counts: list[int]) -> list[float]:
    x = torch.ones(sum(counts), 8, device=CUDA)
    adapters.expect(0)
    base = model(x)
    adapters.set_rows(rows, counts)
    adapters.expect(len(x))
    found = model(x)
    adapters.expect(0)
    return [round(value) for value in (found - base)[:, 0].tolist()]


def test_the_slot_that_was_used_longest_ago_is_taken(card: Card) -> None:
    model, adapters = tiny_adapters(2)
    assert list(adapters.layers) == ["all"]
    one, two, three = (adapters.pack(matrices(value), no_pause) for value in (1.0, 2.0, 3.0))
    assert added(model, adapters, [one, None, two], [1, 2, 1]) == [8, 0, 0, 16]
    assert added(model, adapters, [one], [2]) == [8, 8]
    held = [slot for slot, packed in adapters._held.items() if packed is two]
    assert added(model, adapters, [None, three, one], [1, 1, 3]) == [0, 24, 8, 8, 8]
    assert [slot for slot, packed in adapters._held.items() if packed is three] == held
    assert adapters._of_token.tolist()[5:] == [-1] * 11, "behind the last token, as graphs with padding read them"
    assert added(model, adapters, [two, three], [1, 1]) == [16, 24]
    assert adapters._of_token.tolist()[2:] == [-1] * 14
    assert added(model, adapters, [None, None], [1, 1]) == [0, 0], "as of a step whose rows have failed"
    with pytest.raises(RuntimeError, match="all was called with 3 rows in place of 2 tokens"), torch.inference_mode():
        adapters.expect(2)
        model(torch.ones(3, 8, device=CUDA))


def launched(model: Tiny, adapters: DeviceAdapters, rows: list[Any]) -> Tensor:
    """The sums that a step with one token a row adds [rows], once the card has come to it."""
    with torch.inference_mode():
        adapters.set_rows(rows, [1] * len(rows))
        adapters.expect(len(rows))
        found = model(torch.ones(len(rows), 8, device=CUDA)) - model.all.weight.sum(1)
        adapters.expect(0)
        return found[:, 0]


def test_a_copy_waits_for_the_last_step_that_read_its_slot_and_for_none_behind(card: Card) -> None:
    model, adapters = tiny_adapters(2)
    one, two, three = (adapters.pack(matrices(value), no_pause) for value in (1.0, 2.0, 3.0))
    steps, copies, ends = card.current_stream(), adapters._copies._stream, []
    results = []
    for rows in ([two, one], [two], [None], [two, three], [three], [None]):
        results.append(launched(model, adapters, rows))
        ends.append(steps.submitted)
    assert steps.done < ends[0]
    copies.synchronize()
    assert copies.done == copies.submitted and ends[0] <= steps.done < ends[1], "three takes the slot of one"
    assert [[round(x) for x in found.tolist()] for found in results] == [[16, 8], [16], [0], [16, 24], [24], [0]]


def test_only_the_first_step_that_reads_a_slot_waits_for_its_copy(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = tiny_adapters(2)
    one, two = (adapters.pack(matrices(value), no_pause) for value in (1.0, 2.0))
    waits: list[Any] = []
    wait = torch.cuda.Stream.wait_stream
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: waits.append(other) or wait(self, other))
    counts = []
    for rows in ([None], [one], [one, one], [None], [one, two], [two], [one]):
        launched(model, adapters, rows)
        counts.append(len(waits))
    assert counts == [0, 1, 1, 1, 2, 2, 2]


def test_a_step_that_fails_between_two_copies_leaves_both_slots_right(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = tiny_adapters(2)
    one, two = (adapters.pack(matrices(value), no_pause) for value in (1.0, 2.0))
    fill = adapters._copies.fill

    def fails(slot: int, values: Tensor) -> None:
        if values is two.values:
            raise torch.OutOfMemoryError("no")
        fill(slot, values)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(adapters._copies, "fill", fails)
        launched(model, adapters, [one, two])
    later = launched(model, adapters, [one]), launched(model, adapters, [two, one])
    assert [[round(x) for x in found.tolist()] for found in later] == [[8], [16, 8]]


def test_a_copy_waits_for_the_check_at_load(card: Card) -> None:
    model, adapters = tiny_adapters(1)
    adapters.verify()
    found = launched(model, adapters, [adapters.pack(matrices(2.0), no_pause)])
    adapters._copies._stream.synchronize()
    assert round(found[0].item()) == 16


class OfTheFirstSlot(ReferenceLora):
    def add(self, x: Tensor, slots: LoraSlots, slot_of_token: Tensor, y: Tensor) -> None:
        super().add(x, slots, slot_of_token.clamp(max=0), y)


def test_a_kernel_that_reads_another_slot_is_refused_at_load(card: Card) -> None:
    _, adapters = tiny_adapters(3)
    adapters.verify()
    assert not bool(adapters._slots.any())
    adapters._ops = OfTheFirstSlot()
    with pytest.raises(LoadError, match="differs by"):
        adapters.verify()


@pytest.mark.parametrize(("depth", "off", "is_right"), [(4096, 40, True), (4096, 100, False), (64, 40, False)])
def test_the_tolerance_grows_with_the_root_of_what_is_summed(depth: int, off: float, is_right: bool) -> None:
    """In units of float32's rounding."""

    class Rounded(ReferenceLora):
        def add(self, x: Tensor, slots: LoraSlots, slot_of_token: Tensor, y: Tensor) -> None:
            super().add(x, slots, slot_of_token, y)
            y *= 1 + off * torch.finfo(torch.float32).eps

    slots = lora_slots(2, depth, (8,), 16, torch.float32)
    assert (device_adapters._wrong(Rounded(), slots, 64) is None) == is_right


def test_an_adapter_that_has_left_is_still_copied(card: Card) -> None:
    """Its slot has another one, and its memory was freed, when the card comes to it."""
    model, adapters = tiny_adapters(1)
    packed: list[Any] = [adapters.pack(matrices(value), no_pause) for value in (1.0, 2.0)]
    found = []
    with torch.inference_mode():
        for one in (0, 1):
            adapters.set_rows([packed[one]], [1])
            adapters.expect(1)
            found.append(model(torch.ones(1, 8, device=CUDA)) - model.all.weight.sum(1))
            packed[one] = None
            adapters.pack(matrices(9.0), no_pause)
    assert [round(values[0, 0].item()) for values in found] == [8, 16]
