"""One engine continues what another one has computed, and read from its host memory: the same tokens."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from peer_rig import wait_until_it_listens
from redis_rig import free_port

from inflight import LLM, SamplingParams
from inflight.engine.attached import Attached
from inflight.engine.messages import AddRequest
from inflight.engine.policies import tier_admission
from inflight.engine.sampling_params import SamplingParams as EngineParams
from inflight.engine.tiers.seal import Seal
from inflight.runner.stores.peer_store import PeerStore

LENGTH = 150  # tokens; an extent has 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("peer")))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes slowly, so that any load pays."""
    monkeypatch.setattr(tier_admission.TierAdmission, "_compute_seconds", lambda *_: 60.0)


@pytest.fixture
def port() -> Iterator[int]:
    yield free_port()


def engine(folder: str, **options: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "kv_cache_memory": "16MiB", "block_size": 4, "cpu_threads": 1, **options})


def first(folder: str, port: int, **options: Any) -> LLM:
    """The engine that is read."""
    return engine(
        folder, **{"kv_tiers": [{"type": "host", "size": "64MiB"}], "kv_listen": f"127.0.0.1:{port}", **options}
    )


def second(folder: str, port: int, **options: Any) -> LLM:
    return engine(folder, **{"kv_tiers": [{"type": "peer", "url": f"tcp://127.0.0.1:{port}"}], **options})


def prompt(seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, VOCAB), k=LENGTH)


def said(llm: LLM, *prompts: list[int], count: int = 12, **params: Any) -> list[tuple[list[list[int]], int]]:
    """Of each prompt the sequences, and how many tokens were cached."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "seed": 3, **params})
    found = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling)
    return [([one.token_ids for one in answer.outputs], answer.num_cached_tokens) for answer in found]


def wait_until_it_is_written(llm: LLM) -> None:
    tiers, deadline = llm.core.info.tiers, time.monotonic() + 60
    assert tiers is not None
    writer = tiers.coming.__self__  # type: ignore[attr-defined]
    while writer._computed or tiers.tiers[0].queued:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_second_engine_continues_what_the_first_has_just_computed(
    folder: str, port: int, async_scheduling: bool
) -> None:
    """Although the extents may not be written yet when it asks."""
    with first(folder, port, async_scheduling=async_scheduling) as giver, second(folder, port) as taker:
        for seed in range(4):
            [([token], cached)] = said(giver, prompt(seed), count=1)
            assert cached == 0
            [([answer], cached)] = said(taker, [*prompt(seed), *token])
            assert [[*token, *answer]] == greedy_reference(folder, [prompt(seed)], [13])
            assert cached == 148, "the full blocks"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_answer_that_goes_on_is_continued_with_the_whole_prompt_at_the_first_question(
    folder: str, port: int, async_scheduling: bool
) -> None:
    """The first engine has yielded one token, and its request still runs, as in a handover."""
    with first(folder, port, async_scheduling=async_scheduling) as giver, second(folder, port) as taker:
        assert not taker.core.info.tiers.tiers[0].is_shared, "it is asked once"
        sampling = EngineParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        giver.core.add_request(AddRequest(7, prompt(), sampling))
        while not (deltas := giver.core.step().deltas):
            pass
        over = threading.Event()
        goes_on = threading.Thread(target=lambda: [giver.core.step() for _ in iter(over.is_set, True)])
        goes_on.start()
        try:
            rest = AddRequest(
                8,
                prompt(),
                EngineParams(temperature=0.0, max_tokens=12, ignore_eos=True),
                output_token_ids=[deltas[0].token_ids],
                attached=Attached(resumed=True),
            )
            taker.core.add_request(rest)
            answer: list[int] = []
            while taker.core.has_work:
                for delta in taker.core.step().deltas:
                    answer += delta.token_ids
        finally:
            over.set()
            goes_on.join()
        assert [[*deltas[0].token_ids, *answer]] == greedy_reference(folder, [prompt()], [12])
        assert taker.core.info.tiers.num_hits == 128, "both whole extents"


def test_what_is_about_to_be_stored_elsewhere_is_not_announced(
    folder: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory gets what is computed twice, and the disk everything."""
    tiers = [
        {"type": "host", "size": "64MiB", "write": "second"},
        {"type": "disk", "size": "64MiB", "path": str(tmp_path)},
    ]
    with first(folder, port, kv_tiers=tiers, async_scheduling=True) as giver:
        giver.core.add_request(AddRequest(7, prompt(), EngineParams(temperature=0.0, max_tokens=99, ignore_eos=True)))
        while not giver.core.step().deltas:
            pass
        made: Any = giver.core.info.tiers
        host, disk = made.tiers
        keys = [one.key for one in made.coming.__self__._computed]
        assert [made.coming(disk, key) for key in keys] == [True, True]
        assert [made.coming(host, key) for key in keys] == [False, False]
        reader = PeerStore("127.0.0.1", port, made.seal.namespace, b"", 30.0)
        with contextlib.closing(reader), monkeypatch.context() as patch:
            patch.delattr(Seal, "key_of")  # a look costs no hash
            assert reader.find(keys) == 0 and reader.first_of(keys) == 2


@pytest.mark.nightly
def test_n_sequences_and_logprobs_are_those_of_one_engine(folder: str, port: int) -> None:
    asked = {"n": 3, "temperature": 0.9, "logprobs": 2}
    with engine(folder) as alone:
        [(expected, _)] = said(alone, prompt(), **asked)
    with first(folder, port) as giver, second(folder, port) as taker:
        said(giver, prompt(), count=1)
        [(found, cached)] = said(taker, prompt(), **asked)
    assert found == expected and cached == 148


@pytest.mark.nightly
def test_a_secret_that_differs_and_weights_that_differ_are_a_miss(folder: str, port: int, tmp_path: Path) -> None:
    expected = greedy_reference(folder, [prompt()], [12])
    for name in ("one", "two"):
        (tmp_path / name).write_text(name * 20)
    with first(folder, port, kv_store_secret_file=str(tmp_path / "one")) as giver:
        said(giver, prompt(), count=1)
        cases = [("two", {}, 0), ("one", {"kv_cache_dtype": "int8"}, 0), ("one", {}, 148)]
        for secret, options, hit in cases:
            with second(folder, port, kv_store_secret_file=str(tmp_path / secret), **options) as taker:
                [(answer, cached)] = said(taker, prompt())
                assert cached == hit
                assert options or answer == expected
        with second(folder, port) as taker:
            assert said(taker, prompt()) == [(expected, 0)]


@pytest.mark.nightly
def test_the_engine_that_is_read_ends_and_comes_back(folder: str, port: int) -> None:
    expected = [greedy_reference(folder, [prompt(seed)], [12]) for seed in range(3)]
    with second(folder, port) as taker:
        assert said(taker, prompt(0)) == [(expected[0], 0)]
        for seed in (1, 2):
            with first(folder, port) as giver:
                said(giver, prompt(seed), count=1)
                assert said(taker, prompt(seed)) == [(expected[seed], 148)]
            assert said(taker, prompt(seed)) == [(expected[seed], 148)]  # of its own prefix cache


def test_what_was_evicted_is_kept_again_when_it_is_found(folder: str, port: int) -> None:
    """Host memory for little more than one prompt: the first engine has the second prompt, too, in its pool."""
    with first(folder, port, kv_tiers=[{"type": "host", "size": "48KiB"}]) as giver, second(folder, port) as taker:
        for seed in (0, 1, 0):
            said(giver, prompt(seed), count=1)
            wait_until_it_is_written(giver)
        [(answer, cached)] = said(taker, prompt(0))
        assert answer == greedy_reference(folder, [prompt(0)], [12])
        assert cached >= 128, "both whole extents"


@pytest.mark.nightly
def test_a_port_that_another_engine_has_is_taken_when_it_is_free(folder: str, port: int) -> None:
    """As in a reload, where the new version starts before the old one ends."""
    old = first(folder, port)
    with first(folder, port) as new:
        assert said(new, prompt(), count=1)
        old.close()
        wait_until_it_listens(port)
        with second(folder, port) as taker:
            assert said(taker, prompt())[0][1] == 148


@pytest.mark.nightly
def test_a_model_that_cannot_be_loaded_leaves_the_port(folder: str, port: int) -> None:
    with pytest.raises(Exception, match="blocks"):
        first(folder, port, num_gpu_blocks_override=1, max_model_len=128)
    with first(folder, port) as giver, second(folder, port) as taker:
        said(giver, prompt(), count=1)
        assert said(taker, prompt())[0][1] == 148
