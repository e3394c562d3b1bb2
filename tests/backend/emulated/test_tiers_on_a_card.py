"""KV tiers of engines on an emulated card: tokens are those of the CPU without tiers, whatever the tiers do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card_rig import card_core, functions_as_kernels, without_waits
from checkpoints import make_checkpoint
from emulated_card import Card, emulated_card
from every_kind import every_kind, prompt_of, work_of
from offline import make_config, make_core, run, tokens
from tiers_rig import Directed

from inflight.attention.base import KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.policies import tier_admission
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.tiers.loads import Loads
from inflight.engine.tiers.writer import TierWriter
from inflight.kernels.gpu import gpu_kv_cache
from inflight.loading.saved.kv_identity import kv_namespace
from inflight.runner import kv_tiers, staged_blocks
from inflight.runner.block_io import PoolBlocks
from inflight.runner.staged_blocks import StagedBlocks

MIB = 2**20
LIMITS: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)
BLOCK = 2  # tokens; an extent has 16 blocks, a part that is kept 4
POOL = 64  # blocks; 16 can be reserved
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)
DRAFTING: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
SWAPPING: dict[str, Any] = {"swap_space": "1MiB", "preemption_mode": "swap"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str) -> EngineCore:
    return make_core(checkpoint, **LIMITS, seed=1)


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)
    for name in ("_UNMEASURED_GPU_SECONDS", "_UNMEASURED_SECONDS"):
        monkeypatch.setattr(tier_admission, name, 1.0)
    monkeypatch.setattr(tier_admission, "_MEASURED_TOKENS", 10**6)  # a card that computes slowly, so that loads pay


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Directed:
    """Tiers of engines that are made from now on do their work when the test says so."""
    made = Directed()
    monkeypatch.setattr(kv_tiers, "TierThreads", made.made)
    return made


def tiered(checkpoint: str, disk: Path, **options: Any) -> EngineCore:
    tiers = [{"type": "disk", "path": str(disk), "size": "64MiB"}]
    fixed = dict(seed=1, block_size=BLOCK, num_gpu_blocks_override=POOL, kv_tiers=tiers)
    core = without_waits(card_core(checkpoint, **{**fixed, **options}))
    assert core.info.tiers is not None
    core.info.tiers.blocks.copy([0])  # the first use waits for all that the card has to do
    return core


def extents(disk: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in disk.rglob("*") if path.is_file() and len(path.name) == 32}


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Of every kind; two of four begin alike."""
    prompts = [prompt_of(index // 2, 34 + (7 * index) % 17) for index in range(count)]
    return prompts, [every_kind(index) for index in range(count)]


_OPTIONS: list[dict[str, Any]] = [
    {},
    SWAPPING | DRAFTING,
    {"enforce_eager": True, "async_scheduling": False},
    {"num_gpu_blocks_override": None, "block_size": 1},
]


@pytest.mark.parametrize(
    "options", [pytest.param(one, marks=() if one in _OPTIONS[:1] else pytest.mark.nightly) for one in _OPTIONS]
)
def test_conversations_return_in_a_new_engine(
    card: Card, checkpoint: str, on_the_cpu: EngineCore, tmp_path: Path, options: dict[str, Any]
) -> None:
    """With the tiers' own threads, host memory before the disk."""
    prompts, params = requests(8)
    expected = work_of(on_the_cpu, prompts, params, stagger=2)
    disk = {"type": "disk", "path": str(tmp_path), "size": "64MiB"}
    hits = []
    for _ in range(2):
        core = tiered(checkpoint, tmp_path, kv_tiers=[{"type": "host", "size": "64KiB"}, disk], **options)
        assert work_of(core, prompts, params, stagger=2) == expected
        assert core.info.tiers is not None
        core.info.tiers.close()
        totals = core.info.tiers.totals()
        assert not any(tier.errors_total for tier in totals.tiers)
        hits.append(totals.hits_total)
    assert hits[1] >= 64
    assert not card.launched_at_once


def run_with_aborts(core: EngineCore, hand: Directed, rng: random.Random, count: int) -> dict[tuple[int, int], Any]:
    """Requests that share prompts arrive, are aborted, and wait for a tier that works between all steps: a step is in
    flight then.  Returns what each sequence got, and whether that was all."""
    prompts, params = requests(count)
    got: dict[tuple[int, int], tuple[list[int], bool]] = {}
    waiting, running = list(range(count)), set[int]()
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            number = waiting.pop(0)
            assert core.add_request(AddRequest(number, prompts[number], params[number])) is None
            running.add(number)
        for delta in core.step().deltas:
            key = delta.request_id, delta.index
            got[key] = [*got.get(key, ([], False))[0], *delta.token_ids], delta.finish_reason is not None
        check_core(core)
        hand.run(rng.randrange(3), last_first=rng.random() < 0.3)
        if running and rng.random() < 0.1:
            core.abort(rng.choice(sorted(running)))
    hand.run(len(hand.tasks))
    return got


@pytest.mark.parametrize(("count", "seeds"), [(12, [1, 2]), pytest.param(24, range(6), marks=pytest.mark.nightly)])
def test_loads_beside_steps_aborts_and_preemptions(
    checkpoint: str, on_the_cpu: EngineCore, tmp_path: Path, hand: Directed, count: int, seeds: Sequence[int]
) -> None:
    """On a card that also works at random moments, and on one that works as late as it may."""
    prompts, params = requests(count)
    expected = {key: tokens(deltas) for key, deltas in run(on_the_cpu, prompts, params).items()}
    hits = preempted = 0
    for seed in seeds:
        with emulated_card(rng=random.Random(seed) if seed % 2 else None):
            core = tiered(checkpoint, tmp_path, enforce_eager=seed % 3 == 2, **(SWAPPING if seed % 2 else {}))
            for key, (found, is_whole) in run_with_aborts(core, hand, random.Random(seed), count).items():
                assert found == expected[key] if is_whole else found == expected[key][: len(found)]
            assert core.info.tiers is not None
            hits += core.info.tiers.num_hits
            preempted += core.scheduler.num_preempted_total
    assert hits > 100 and preempted > 0


def serve(core: EngineCore, hand: Directed) -> list[int]:
    add(core, 0, prompt_of(1, 40))
    deltas: list[SequenceDelta] = []
    while core.has_work:
        deltas += core.step().deltas
        hand.run(len(hand.tasks))
    return tokens(deltas)


def load_into_blocks_of_a_step_in_flight(checkpoint: str, disk: Path, hand: Directed) -> list[int]:
    """The tokens of a request whose extent is read as soon as its blocks are reserved, if it may."""
    core = tiered(checkpoint, disk, enforce_eager=True)
    add(core, 0, prompt_of(2, 44), max_tokens=18)  # it holds up to 31 of the 64 blocks
    for _ in range(4):
        core.step()
        hand.run(len(hand.tasks))
    add(core, 2, prompt_of(1, 40))
    core.step()  # it asks, and is answered later
    add(core, 1, prompt_of(3, 60))
    core.step()
    hand.run(1, last_first=True)
    core.step()
    core.step()  # the last tokens of its prompt are in flight
    hand.run(len(hand.tasks))
    core.abort(1)
    launch: Callable[[Any], Any] = core.runner.launch

    def late(out: Any) -> Any:
        """The tier works before the step that was launched last is collected."""
        hand.run(len(hand.tasks))
        return launch(out)

    core.runner.launch = late  # type: ignore[method-assign]
    found: list[SequenceDelta] = []
    while core.has_work:
        found += [delta for delta in core.step().deltas if delta.request_id == 2]
        hand.run(len(hand.tasks))
        check_core(core)
    assert core.info.tiers is not None and core.info.tiers.num_hits == 32
    return tokens(found)


def add(core: EngineCore, request_id: int, prompt: list[int], max_tokens: int = 6) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    assert core.add_request(AddRequest(request_id, prompt, params)) is None


def test_a_load_waits_for_the_steps_that_write_its_blocks(
    card: Card, checkpoint: str, on_the_cpu: EngineCore, tmp_path: Path, hand: Directed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of an aborted request are reserved while its step is in flight; without the fence that step would
    write over what was read."""
    expected = tokens(run(on_the_cpu, [prompt_of(1, 40)], [GREEDY])[0, 0])
    for name in ("with", "without"):
        serve(tiered(checkpoint, tmp_path / name, enforce_eager=True), hand)
    assert load_into_blocks_of_a_step_in_flight(checkpoint, tmp_path / "with", hand) == expected
    monkeypatch.setattr(Loads, "step_made", lambda self, out: self._preempted.clear())
    monkeypatch.setattr(Loads, "step_done", lambda self, step: None)
    assert load_into_blocks_of_a_step_in_flight(checkpoint, tmp_path / "without", hand) != expected


def kept_at_an_abort(checkpoint: str, disk: Path, hand: Directed, num_steps: int) -> dict[str, bytes]:
    core = tiered(checkpoint, disk, enforce_eager=True)
    add(core, 0, prompt_of(1, 29), max_tokens=20)
    for _ in range(num_steps):
        core.step()
        hand.run(len(hand.tasks))
    core.abort(0)
    hand.run(len(hand.tasks))
    while core.has_work:
        core.step()
        hand.run(len(hand.tasks))
    return extents(disk)


def test_only_what_a_collected_step_has_computed_is_kept(
    card: Card, checkpoint: str, tmp_path: Path, hand: Directed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an abort the last block of an extent is in flight; without the fence it would be copied before it is there."""
    right = kept_at_an_abort(checkpoint, tmp_path / "right", hand, 12)
    cut = kept_at_an_abort(checkpoint, tmp_path / "cut", hand, 4)
    assert cut and cut.items() <= right.items()
    monkeypatch.setattr(TierWriter, "step_made", lambda self, out: None)
    wrong = kept_at_an_abort(checkpoint, tmp_path / "wrong", hand, 4)
    assert wrong.keys() == cut.keys() and wrong != cut


@pytest.mark.nightly
def test_a_copy_that_is_not_waited_for_changes_tokens(
    card: Card, checkpoint: str, on_the_cpu: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hand: Directed
) -> None:
    """These tests find blocks that are adopted before the card has them."""
    expected = tokens(run(on_the_cpu, [prompt_of(1, 40)], [GREEDY])[0, 0])
    serve(tiered(checkpoint, tmp_path, enforce_eager=True), hand)

    @contextmanager
    def launches(buffer: Any) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(buffer.stream):
            yield

    found = []
    for _ in range(2):
        core = tiered(checkpoint, tmp_path, enforce_eager=True)
        found.append(serve(core, hand))
        assert core.info.tiers is not None and core.info.tiers.num_hits == 32
        monkeypatch.setattr(staged_blocks, "_launches", launches)
    assert found[0] == expected != found[1]


@pytest.mark.nightly
def test_a_changed_byte_is_computed(card: Card, checkpoint: str, on_the_cpu: EngineCore, tmp_path: Path) -> None:
    prompts, params = requests(4)
    expected = work_of(on_the_cpu, prompts, params, stagger=2)
    first = tiered(checkpoint, tmp_path)
    assert work_of(first, prompts, params, stagger=2) == expected
    assert first.info.tiers is not None
    first.info.tiers.close()
    for number, path in enumerate(sorted(path for path in tmp_path.rglob("*") if path.name in extents(tmp_path))):
        changed = bytearray(path.read_bytes())
        changed[(len(changed) * (number + 1)) // 7 % len(changed)] ^= 4
        path.write_bytes(changed)
    core = tiered(checkpoint, tmp_path)
    assert work_of(core, prompts, params, stagger=2) == expected
    assert core.info.tiers is not None
    assert core.info.tiers.num_hits == 0
    assert core.info.tiers.totals().tiers[0].errors_total.keys() == {"corrupt"}
    core.info.tiers.close()


def test_the_namespace_is_of_the_card(checkpoint: str) -> None:
    config = make_config(checkpoint)
    same = ReferenceAttention(), torch.bfloat16, None
    names = [kv_namespace(config, "reference", "bfloat16", caches_of(*same, "cpu"))]
    for capability in ((8, 0), (9, 0), (9, 0)):
        with emulated_card(capability=capability):
            names.append(kv_namespace(config, "reference", "bfloat16", caches_of(*same, "cuda")))
    assert names[2] == names[3] and len(set(names)) == 3


@pytest.mark.nightly
def test_the_pool_leaves_room_for_the_buffers(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a model whose extents are large."""
    monkeypatch.setattr(staged_blocks, "blocks_of_extent", lambda num_bytes, on_cores: 12 * MIB // num_bytes)
    caplog.set_level("INFO")
    for tiers in ([], [{"type": "host", "size": "1MiB"}]):
        with emulated_card(total=512 * MIB):
            core = card_core(checkpoint, kv_cache_memory=None, gpu_memory_utilization=0.9, kv_tiers=tiers)
            run(core, [prompt_of(1, 40)], [GREEDY])
            assert torch.cuda.max_memory_reserved() <= 0.9 * 512 * MIB
    without, with_tiers = (float(found) for found in re.findall(r"workspaces ([\d.]+) MiB", caplog.text))
    assert with_tiers - without >= 3 * 12


def caches_of(backend: Any, dtype: torch.dtype, kv_cache_dtype: torch.dtype | None, device: str) -> list[KVCache]:
    specs = [LayerSpec(4, 2, 16, size, 1.0, kv_cache_dtype=kv_cache_dtype) for size in (16, 8, 3)]
    return [backend.new_cache(9, 3, spec, dtype, torch.device(device)) for spec in specs]


@pytest.mark.parametrize("kv_cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", [ReferenceAttention(), gpu_kv_cache])
@pytest.mark.parametrize("blocks", [[4, 5, 2], [8]])
def test_blocks_on_a_card_have_the_bytes_of_blocks_on_the_host(
    card: Card, backend: Any, kv_cache_dtype: torch.dtype | None, blocks: list[int]
) -> None:
    caches = caches_of(backend, torch.bfloat16, kv_cache_dtype, "cpu")
    on_card = caches_of(backend, torch.bfloat16, kv_cache_dtype, "cuda")
    host, staged = PoolBlocks(caches), StagedBlocks(SimpleNamespace(caches=on_card), 1)  # type: ignore[arg-type]
    assert staged.bytes_per_block == host.bytes_per_block
    for number, (cache, same) in enumerate(zip(caches, on_card)):
        for part, copied in ((cache.key, same.key), (cache.value, same.value)):
            part.copy_(torch.randint(-90, 90, part.shape, generator=torch.Generator().manual_seed(number)))
            copied.copy_(part)
    content = host.copy(blocks)
    assert bytes(staged.copy(blocks)) == bytes(content)

    def read(frames: Any) -> bool:
        start = 0
        for frame in frames:
            frame[:] = content[start : start + frame.nbytes]
            start += frame.nbytes
        return start == content.nbytes

    places = [1, 7, 0][: len(blocks)]
    assert host.fill(places, read) and staged.fill(places, read)
    assert not staged.fill([3], lambda frames: False)
    for cache, same in zip(caches, on_card):
        for part, copied in ((cache.key, same.key), (cache.value, same.value)):
            assert torch.equal(part.view(torch.uint8), copied.cpu().view(torch.uint8))
