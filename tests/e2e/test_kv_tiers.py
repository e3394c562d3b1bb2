"""KV tiers behind a real tritonserver: conversations outlive their engine, and no store fails a request."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_rig import LMCacheServer
from model_entries import CHECKPOINT, loaded
from offline import make_core, run, tokens
from processes_of import engine_process
from redis_rig import RedisServer, needs_redis
from typer.testing import CliRunner
from wire import GrpcStream, gauges, wait_for

from inflight.engine.sampling_params import SamplingParams
from inflight_tools.cli import app
from inflight_tools.launcher import TritonServer

LENGTH = 1300  # tokens of a prompt; an extent has 256
OUTPUT = 12
_ATTEMPTS = 10  # a busy machine can take longer to read than the engine expects to compute


def prompt(seed: int) -> list[int]:
    return [random.Random(seed).randrange(10, 2000) for _ in range(LENGTH)]


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """The engine's answers without tiers, by the seed of the prompt."""
    params = [SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)] * 6
    offline = run(make_core(str(CHECKPOINT)), [prompt(seed) for seed in range(6)], params)
    return {seed: tokens(offline[seed, 0]) for seed in range(6)}


def say(server: TritonServer, model: str, *seeds: int) -> dict[int, list[int]]:
    """The answers to prompts that are sent at once."""
    with GrpcStream(server.grpc_address, model) as stream:
        for seed in seeds:
            params = {"max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}
            stream.send(
                str(seed), input_ids=prompt(seed), stream=True, return_token_ids=True, sampling_parameters=params
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
def tiered(triton: TritonServer, folder: Path) -> Iterator[TritonServer]:
    tiers = [{"type": "host", "size": "64MiB"}, {"type": "disk", "path": str(folder), "size": "1GiB"}]
    with loaded(triton, tiered={"kv_tiers": tiers}):
        yield triton


def test_a_conversation_outlives_its_engine(tiered: TritonServer, folder: Path, expected: dict[int, list[int]]) -> None:
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


def test_damaged_files_are_found_and_computed(
    tiered: TritonServer, folder: Path, expected: dict[int, list[int]]
) -> None:
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


def test_a_folder_that_goes_away_fails_no_request(
    tiered: TritonServer, folder: Path, expected: dict[int, list[int]]
) -> None:
    """At last a file is in its place."""
    remove(folder)
    assert say(tiered, "tiered", 2, 3) == {seed: expected[seed] for seed in (2, 3)}
    remove(folder)
    folder.write_text("no folder")
    engine_process(tiered, "tiered").kill()
    assert say(tiered, "tiered", 3, 4, 5) == {seed: expected[seed] for seed in (3, 4, 5)}
    wait_for(lambda: count(tiered, "tiered", "inflight_kv_tier_errors_total"))


@pytest.mark.nightly
@needs_redis
def test_a_redis_that_stops_and_dies_fails_no_request(
    triton: TritonServer, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    with (
        RedisServer(tmp_path) as redis,
        loaded(triton, shared={"kv_tiers": [{"type": "redis", "url": redis.url}]}),
    ):
        assert say(triton, "shared", 2, 3) == {seed: expected[seed] for seed in (2, 3)}
        wait_for(lambda: redis.size() >= 2 * (LENGTH // 256))
        redis.stop()
        assert say(triton, "shared", 0, 1, 4) == {seed: expected[seed] for seed in (0, 1, 4)}
        redis.go_on()
        engine_process(triton, "shared").kill()
        assert say(triton, "shared", 2, 3, 5) == {seed: expected[seed] for seed in (2, 3, 5)}
        redis.kill()
        assert say(triton, "shared", 0, 1, 2) == {seed: expected[seed] for seed in (0, 1, 2)}


@pytest.mark.nightly
def test_an_lmcache_that_stops_and_dies_fails_no_request(
    triton: TritonServer, tmp_path: Path, expected: dict[int, list[int]]
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
