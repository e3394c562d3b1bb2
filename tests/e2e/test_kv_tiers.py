"""KV tiers behind a real tritonserver: conversations outlive their engine, and no store fails a request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hanging_disk import hanging_disk
from kv_events_rig import Ear
from lmcache_rig import LMCacheServer
from model_entries import CHECKPOINT, load, loaded, unload, write_entry
from offline import make_core, run, tokens
from processes_of import engine_process
from redis_rig import RedisServer, free_port, needs_redis
from small_disk import can_only_be_read, small_disk
from tier_load import CANARY, OUTPUT, TierLoad, conversation
from typer.testing import CliRunner
from wire import GrpcStream, gauges, wait_for

from inflight.engine.sampling_params import SamplingParams
from inflight_tools.cli import app
from inflight_tools.launcher import TritonServer

LENGTH = 1300  # tokens of a conversation; an extent has 256
SEEDS = 12
_ATTEMPTS = 10  # a busy machine can take longer to read than the engine expects to compute


class Expected(dict[int | None, list[int]]):
    """The engine's answers without tiers, computed when they are asked for: by the seed; None: the canary's."""

    def __init__(self) -> None:
        self._core = make_core(str(CHECKPOINT))

    def __missing__(self, seed: int | None) -> list[int]:
        prompt = CANARY if seed is None else conversation(seed)
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        self[seed] = tokens(run(self._core, [prompt], [params])[0, 0])
        return self[seed]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


def say(server: TritonServer, model: str, *seeds: int) -> dict[int, list[int]]:
    """The answers to prompts that are sent at once."""
    with GrpcStream(server.grpc_address, model) as stream:
        for seed in seeds:
            params = {"max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}
            stream.send(
                str(seed), input_ids=conversation(seed), stream=True, return_token_ids=True, sampling_parameters=params
            )
        stream.wait(*map(str, seeds))
        assert not [answer.error for answer in stream.answers.values() if answer.error]
        return {seed: stream.answers[str(seed)].token_ids for seed in seeds}


def count(server: TritonServer, model: str, name: str) -> float:
    return gauges(server.metrics_address, model).get(name, 0.0)


def extents(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/??/*") if not path.name.startswith(".")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "tier"


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sockets of KV events."""
    sockets = tmp_path_factory.mktemp("events")
    return {"endpoint": f"ipc://{sockets}/events", "replay_endpoint": f"ipc://{sockets}/replay"}


@pytest.fixture(scope="module")
def tiered(triton: TritonServer, folder: Path, events: dict[str, str]) -> Iterator[TritonServer]:
    tiers = [{"type": "host", "size": "64MiB"}, {"type": "disk", "path": str(folder), "size": "1GiB"}]
    with loaded(triton, tiered={"kv_tiers": tiers, "kv_events_config": {"enable_kv_cache_events": True, **events}}):
        yield triton


def test_a_conversation_outlives_its_engine(tiered: TritonServer, folder: Path, expected: Expected) -> None:
    assert say(tiered, "tiered", 0) == {0: expected[0]}
    wait_for(lambda: len(extents(folder)) >= LENGTH // 256)
    for _ in range(_ATTEMPTS):
        engine_process(tiered, "tiered").kill()
        assert say(tiered, "tiered", 0) == {0: expected[0]}
        if hits := count(tiered, "tiered", "vllm:external_prefix_cache_hits_total"):
            break
    assert hits >= 256
    assert count(tiered, "tiered", "vllm:external_prefix_cache_queries_total") >= hits
    assert count(tiered, "tiered", "inflight_kv_tier_load_seconds_count") >= hits // 256
    found = CliRunner().invoke(app, ["status", "--model", "tiered", "--url", tiered.grpc_address])
    assert "disk: " in found.output and "extents read" in found.output, found.output


def test_a_router_knows_what_the_engine_has_and_forgets_it_with_the_engine(
    tiered: TritonServer, events: dict[str, str], expected: Expected
) -> None:
    """By KV events, through the death of the engine; the next one's blocks come from a tier."""
    prompt = conversation(2)

    def knows_prompt() -> bool:
        prefixes = [ear.knows.prefix_of(block) or [] for block in ear.knows.blocks]
        return max(map(len, prefixes), default=0) > LENGTH - 256 and all(
            prefix == prompt[: len(prefix)]
            for prefix in prefixes
            if prefix[:16] == prompt[:16] and len(prefix) <= LENGTH
        )

    with closing(Ear(events["endpoint"])) as ear:
        assert say(tiered, "tiered", 2) == {2: expected[2]}
        ear.hear_until(knows_prompt)
        before = ear.knows.num_cleared
        engine_process(tiered, "tiered").kill()
        ear.hear_until(lambda: ear.knows.num_cleared > before and not ear.knows.blocks)
        assert say(tiered, "tiered", 2) == {2: expected[2]}
        ear.hear_until(knows_prompt)
    assert count(tiered, "tiered", "inflight_kv_event_batches_total") > 0
    assert count(tiered, "tiered", "inflight_kv_event_batches_dropped_total") == 0


def test_damaged_files_are_found_and_computed(tiered: TritonServer, folder: Path, expected: Expected) -> None:
    say(tiered, "tiered", 1)
    wait_for(lambda: len(extents(folder)) >= 2 * (LENGTH // 256))
    for _ in range(_ATTEMPTS):
        engine_process(tiered, "tiered").kill()
        for path in extents(folder):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 3)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 16]))
        assert say(tiered, "tiered", 0, 1) == {seed: expected[seed] for seed in (0, 1)}
        if count(tiered, "tiered", "inflight_kv_tier_errors_total"):
            return
    raise AssertionError("no damage was found")


def remove(folder: Path) -> None:
    """Although the engine may be writing into it."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_that_goes_away_fails_no_request(tiered: TritonServer, folder: Path, expected: Expected) -> None:
    """At last a file is in its place."""
    remove(folder)
    assert say(tiered, "tiered", 2, 3) == {seed: expected[seed] for seed in (2, 3)}
    remove(folder)
    folder.write_text("no folder")
    engine_process(tiered, "tiered").kill()
    assert say(tiered, "tiered", 3, 4, 5) == {seed: expected[seed] for seed in (3, 4, 5)}
    wait_for(lambda: count(tiered, "tiered", "inflight_kv_tier_errors_total"))


@pytest.mark.nightly
def test_a_disk_that_is_full_or_can_only_be_read_or_is_gone_fails_no_request(
    triton: TritonServer, tmp_path: Path, expected: Expected
) -> None:
    """A conversation takes 2.6 MB, and all of them are twice the disk."""
    everything = {seed: expected[seed] for seed in range(SEEDS)}
    with small_disk(tmp_path / "disk", 16) as disk:
        # A pool for three conversations.
        tiers = [{"type": "disk", "path": str(disk / "kv"), "size": "1GiB"}]
        with loaded(triton, small={"kv_tiers": tiers, "kv_cache_memory": "8MiB"}):
            for _ in range(2):
                for seed in range(0, SEEDS, 3):
                    assert say(triton, "small", *range(seed, seed + 3)) == {
                        n: expected[n] for n in range(seed, seed + 3)
                    }
            wait_for(lambda: count(triton, "small", "inflight_kv_tier_errors_total"))  # it was full
            assert say(triton, "small", *range(SEEDS)) == everything
            # There and back: in a round that is longer than the disk, each conversation would leave before it returns.
            for seed in [*range(SEEDS), *reversed(range(SEEDS))] * _ATTEMPTS:
                assert say(triton, "small", seed) == {seed: expected[seed]}
                if count(triton, "small", "vllm:external_prefix_cache_hits_total"):
                    break
            assert count(triton, "small", "vllm:external_prefix_cache_hits_total"), "what fits is still used"
            can_only_be_read(disk)
            engine_process(triton, "small").kill()
            assert say(triton, "small", *range(SEEDS)) == everything
            can_only_be_read(disk, only=False)
            remove(disk / "kv")
            (disk / "other").write_bytes(bytes(15 * 2**20))  # no extent fits any more
            assert say(triton, "small", *range(SEEDS)) == everything
        can_only_be_read(disk)
        with loaded(triton, unwritable={"kv_tiers": tiers}):
            assert say(triton, "unwritable", 0, 1, 2) == {seed: expected[seed] for seed in range(3)}


@pytest.mark.nightly
def test_a_disk_that_hangs_fails_no_request_and_holds_up_no_engine(
    triton: TritonServer, tmp_path: Path, expected: Expected
) -> None:
    """While extents are written and read, while an engine dies, and while models are unloaded and loaded: a process
    that waits for such a disk does not end even by SIGKILL."""
    everything = {seed: expected[seed] for seed in range(4)}
    with hanging_disk(tmp_path / "disk") as disk:
        tiers = [{"type": "disk", "path": str(disk.path / "kv"), "size": "1GiB"}]
        write_entry(triton.repositories[-1], "hangs", kv_tiers=tiers, engine_timeout=5)
        load(triton, "hangs")
        try:
            assert say(triton, "hangs", 0, 1) == {seed: expected[seed] for seed in (0, 1)}
            wait_for(lambda: len(extents(disk.path / "kv")) >= 2 * (LENGTH // 256))
            disk.hang()
            assert say(triton, "hangs", 2, 3) == {seed: expected[seed] for seed in (2, 3)}
            wait_for(disk.num_waiting)
            engine_process(triton, "hangs").kill()
            assert say(triton, "hangs", 0, 1, 2, 3) == everything
            unload(triton, "hangs")
            load(triton, "hangs")
            assert say(triton, "hangs", 0, 1, 2, 3) == everything
            disk.go_on()
            assert say(triton, "hangs", 0, 1, 2, 3) == everything
        finally:
            disk.go_on()
            unload(triton, "hangs")


@pytest.mark.nightly
@needs_redis
def test_a_redis_that_stops_and_dies_under_load_fails_no_request(
    triton: TritonServer, tmp_path: Path, expected: Expected
) -> None:
    """The pool takes three conversations of twelve, so nearly every one comes from Redis, or is computed."""
    with (
        RedisServer(tmp_path) as redis,
        loaded(triton, shared={"kv_tiers": [{"type": "redis", "url": redis.url}], "kv_cache_memory": "8MiB"}),
    ):
        assert say(triton, "shared", *range(SEEDS)) == {seed: expected[seed] for seed in range(SEEDS)}
        streams = [range(0, SEEDS, 2), range(1, SEEDS, 2)]
        assert expected[None]
        with TierLoad(triton.grpc_address, "shared", expected, streams) as load:

            def serve(what: str) -> None:
                seconds = load.wait(answers=8)
                print(f"{what:<20} first token of {len(seconds)} canaries: median {seconds[len(seconds) // 2]:.3f} s")

            wait_for(lambda: count(triton, "shared", "vllm:external_prefix_cache_hits_total"), 120)
            serve("as it should be")
            redis.stop()
            serve("stopped")
            wait_for(lambda: count(triton, "shared", "inflight_kv_tier_errors_total"))
            redis.go_on()
            engine_process(triton, "shared").kill()
            serve("an engine killed")
            redis.stop()
            redis.kill()
            serve("killed")
            with RedisServer(tmp_path, port=redis.port):
                serve("another server")


@pytest.mark.nightly
def test_one_engine_continues_what_another_one_has_computed(triton: TritonServer, expected: Expected) -> None:
    """Its prompts come from the first engine's host memory; which is then stopped, goes on, and is killed."""
    address = f"127.0.0.1:{free_port()}"
    first = {"kv_tiers": [{"type": "host", "size": "64MiB"}], "kv_listen": address}
    second = {"kv_tiers": [{"type": "peer", "url": f"tcp://{address}"}], "kv_cache_memory": "8MiB"}
    with loaded(triton, first=first, second=second):
        for seed in range(_ATTEMPTS):
            assert say(triton, "first", seed) == {seed: expected[seed]}
            assert say(triton, "second", seed) == {seed: expected[seed]}
            if hits := count(triton, "second", "vllm:external_prefix_cache_hits_total"):
                break
        assert hits >= LENGTH // 256 * 256
        assert count(triton, "second", "inflight_kv_tier_load_seconds_count") >= LENGTH // 256
        found = CliRunner().invoke(app, ["status", "--model", "second", "--url", triton.grpc_address])
        assert "peer: " in found.output, found.output
        assert say(triton, "first", 3, 4, 5, 6) == {seed: expected[seed] for seed in (3, 4, 5, 6)}
        engine = engine_process(triton, "first")
        engine.suspend()
        assert say(triton, "second", 3, 4) == {seed: expected[seed] for seed in (3, 4)}
        engine.resume()
        assert say(triton, "second", 5) == {5: expected[5]}
        engine.kill()
        assert say(triton, "second", 3, 4, 6) == {seed: expected[seed] for seed in (3, 4, 6)}
        assert say(triton, "first", 7) == {7: expected[7]}
        assert say(triton, "second", 7) == {7: expected[7]}


@pytest.mark.nightly
def test_an_lmcache_that_stops_and_dies_fails_no_request(
    triton: TritonServer, tmp_path: Path, expected: Expected
) -> None:
    with (
        LMCacheServer(tmp_path) as lmcache,
        loaded(triton, lmcache={"kv_tiers": [{"type": "lmcache", "url": lmcache.url}]}),
    ):
        assert say(triton, "lmcache", 2, 3) == {seed: expected[seed] for seed in (2, 3)}
        wait_for(lambda: lmcache.size() >= 2 * (LENGTH // 256))
        for _ in range(_ATTEMPTS):
            engine_process(triton, "lmcache").kill()
            assert say(triton, "lmcache", 2, 3) == {seed: expected[seed] for seed in (2, 3)}
            if hits := count(triton, "lmcache", "vllm:external_prefix_cache_hits_total"):
                break
        assert hits >= 256
        lmcache.stop()
        assert say(triton, "lmcache", 0, 1, 4) == {seed: expected[seed] for seed in (0, 1, 4)}
        lmcache.go_on()
        assert say(triton, "lmcache", 2, 3, 5) == {seed: expected[seed] for seed in (2, 3, 5)}
        lmcache.kill()
        assert say(triton, "lmcache", 0, 1, 2) == {seed: expected[seed] for seed in (0, 1, 2)}
