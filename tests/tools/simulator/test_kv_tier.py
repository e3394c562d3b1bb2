"""KV tiers in the simulator: the engine's own admission decides, on the virtual clock."""

from __future__ import annotations

import json
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import PROFILE, job, simulate
from typer.testing import CliRunner

from inflight.config import ConfigError
from inflight_tools.cli import app
from inflight_tools.simulator.engine import SimulatedEngine
from inflight_tools.simulator.incidents import Incidents, Kill, Rollout
from inflight_tools.simulator.kv_tier import TierSpec, VirtualStore, parse_kv_tier
from inflight_tools.simulator.outcome import Outcome
from inflight_tools.simulator.report import summarise, table
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.slo import SLO

MIB = 2**20
LARGE = msgspec.structs.replace(PROFILE, bytes_per_block=MIB // 16)  # an extent is 16 blocks of 16 tokens
FAST = "disk:1GiB:1.6GB/s:0.2ms"
TOKENS = 1024  # of a prompt; four extents, and computing them takes 0.12 s


def engine(*tiers: str, blocks: int = 512, profile=LARGE, **options) -> SimulatedEngine:
    config = profile.config({"max_model_len": 2048, "num_gpu_blocks_override": blocks, **options})
    return SimulatedEngine.of(config, profile, None, [VirtualStore(parse_kv_tier(tier)) for tier in tiers])


def conversation(index: int, number: int, due: float | None = None, tokens: int = TOKENS + 8):
    """A request of a conversation: all of the same number have the first 1024 tokens in common."""
    return job(index, tokens, 2, due, hash_ids=(2 * number, 2 * number + 1))


def returns(*tiers: str, others: int = 8, **options) -> Outcome:
    """A conversation returns after so many others, which have taken its place in a pool for four."""
    jobs = [conversation(n, n) for n in range(1 + others)]
    return simulate([engine(*tiers, blocks=320, **options)], [*jobs, conversation(1 + others, 0)], users=1)


def test_a_conversation_that_returns_is_loaded():
    computed, loaded = returns(), returns(FAST)
    assert computed.requests[-1].cached == 0 and loaded.requests[-1].cached == TOKENS
    assert loaded.requests[-1].ttft < 0.25 * computed.requests[-1].ttft
    for before, after in zip(computed.requests[:-1], loaded.requests[:-1]):
        assert after.ttft < 1.01 * before.ttft
    report = summarise(loaded, SLO())
    assert report.tier_hits == report.prefix_hits == pytest.approx(TOKENS / (10 * (TOKENS + 8)))
    [tier] = report.kv_tiers
    assert (tier.type, tier.loaded, tier.num_bytes) == ("disk", 4, tier.stored * MIB)
    assert tier.load_seconds == pytest.approx(MIB / 1.6e9 + 0.0002)
    assert "KV tier       disk: 4 extents loaded, 0.86 ms each; " in table(report, SLO())


@pytest.mark.parametrize(
    "tier", ["disk:1GiB:10MB/s:0.2ms", "disk:1GiB:30MB/s:2ms", "disk:1GiB:100MB/s:0.2ms", "redis:1GiB:10GB/s:900ms"]
)
def test_a_tier_of_any_speed_costs_next_to_nothing(tier):
    computed, slow = returns(), returns(tier)
    assert slow.requests[-1].ttft < 2.1 * computed.requests[-1].ttft  # the first time it has not been measured
    jobs = [conversation(n, n % 6) for n in range(60)]
    times = [
        [one.ttft for one in simulate([engine(*tiers, blocks=320)], jobs, users=1).requests][12:]
        for tiers in ((), (tier,))
    ]
    assert sum(times[1]) < 1.05 * sum(times[0])


def test_a_tier_keeps_no_more_than_its_size():
    """It has room for two conversations; the one that was not used for longest goes."""
    outcome = returns("disk:8MiB:1.6GB/s:0.2ms", others=8)
    assert outcome.requests[-1].cached == 0
    [tier] = summarise(outcome, SLO()).kv_tiers
    assert tier.stored > 30 and tier.num_bytes <= 8 * MIB
    assert returns("disk:8MiB:1.6GB/s:0.2ms", "redis:1GiB:1GB/s:0.5ms").requests[-1].cached == TOKENS
    tiny = summarise(returns("disk:1KiB:1.6GB/s:0.2ms"), SLO()).kv_tiers[0]
    assert (tiny.stored, tiny.num_bytes) == (0, 0)


@pytest.mark.parametrize(("tier", "cached"), [("disk", TOKENS), ("host", 0)])
def test_a_disk_outlives_its_engine_and_memory_does_not(tier, cached):
    spec = f"{tier}:1GiB:1.6GB/s:0.2ms"
    jobs = [conversation(0, 0, 0.0), conversation(1, 0, 100.0)]
    incidents = Incidents((Kill(10.0),), startup=20.0)
    outcome = simulate([engine(spec)], jobs, incidents=incidents, successor=partial(engine, spec))
    assert outcome.requests[1].cached == cached
    assert summarise(outcome, SLO()).kv_tiers[0].num_bytes == outcome.replicas[0].kv_tiers.stores[0].num_bytes > 0


@pytest.mark.parametrize(("tier", "cached"), [("redis", TOKENS), ("disk", 0)])
def test_replicas_share_a_server_and_no_disk(tmp_path, tier, cached):
    """They take requests in turn."""
    profile, trace = tmp_path / "mine.json", tmp_path / "trace.jsonl"
    profile.write_bytes(msgspec.json.encode(LARGE))
    rows = [
        {"timestamp": 5000 * n, "input_length": TOKENS + 8, "output_length": 2, "hash_ids": [0, 1, 2 + n]}
        for n in range(2)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--trace", trace, "--replicas", 2, "--router", "round-robin", "--report", tmp_path / "r.json"]
    arguments += ["--kv-tier", f"{tier}:1GiB:1.6GB/s:0.2ms"]
    result = CliRunner().invoke(app, ["simulate", "--profile", str(profile), *map(str, arguments)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert row["tier_hits"] == pytest.approx(cached / (2 * (TOKENS + 8)))
    assert row["kv_tiers"][0]["loaded"] == cached // 256


def test_a_load_makes_the_steps_beside_it_longer_by_little():
    """Half a millisecond of a core for a mebibyte, and at most a tenth of the steps' time."""
    jobs = [conversation(n, n, 1.0 * n) for n in range(9)]
    jobs += [job(9, 4, 400, 20.0), conversation(10, 0, 22.0)]
    alone, loaded = (simulate([engine(FAST, blocks=320)], jobs[:count]) for count in (10, 11))
    computed = simulate([engine(blocks=320)], jobs)
    assert (loaded.requests[10].cached, computed.requests[10].cached) == (TOKENS, 0)
    usual = max(list(alone.gaps)[9:])
    assert usual + 0.0004 < max(list(loaded.gaps)[9:]) < 1.25 * usual < 0.2 * max(list(computed.gaps)[9:])


def test_requests_with_one_stored_prefix_share_its_load():
    jobs = [conversation(n, n, 1.0 * n) for n in range(9)]
    jobs += [conversation(9 + n, 0, 20.0, tokens=TOKENS + 8 + n) for n in range(6)]
    outcome = simulate([engine(FAST, blocks=320, max_num_seqs=8)], jobs)
    assert [request.cached for request in outcome.requests[9:]] == [TOKENS] * 6
    assert summarise(outcome, SLO()).kv_tiers[0].loaded == 4


def test_the_speed_of_a_tier_is_unknown_until_something_was_read():
    spec = "disk:1GiB:10MB/s:0.2ms"
    former, present = engine(spec), engine(spec)
    simulate([former], [conversation(0, 0)])
    present.succeed(former)
    [tier] = present.kv_tiers.tiers.tiers
    present.send(0, IdPrompts(100, 1).make(conversation(0, 0)), conversation(0, 0), 0.0)
    while not tier._began:
        present.step()
    assert present.kv_tiers.tiers.loads and tier.age(present.now) > 0
    while not tier.num_loaded:
        assert tier._extent_seconds == 0 and tier.age(present.now) > 0
        present.step()
    assert tier._extent_seconds == pytest.approx(MIB / 10e6 + 0.0002)


KILLED, DRAINED = "a disk, killed", "a disk, drained"


@pytest.mark.parametrize(
    ("what", "seconds", "cached"),
    [
        *(("redis", seconds, cached) for seconds, cached in ((0.005, 0), (0.025, 256), (0.100, TOKENS))),
        *((KILLED, seconds, cached) for seconds, cached in ((0.005, 0), (0.025, 256), (0.100, TOKENS))),
        (DRAINED, 0.010, TOKENS),
    ],
)
def test_what_is_not_written_yet_is_not_read(what, seconds, cached):
    """So long after the answer another replica is asked, or the only one ends; to write four extents takes 84 ms."""
    spec = parse_kv_tier(f"{'redis' if what == 'redis' else 'disk'}:1GiB:50MB/s:0.2ms")
    store = VirtualStore(spec)
    config = LARGE.config({"max_model_len": 2048, "num_gpu_blocks_override": 512})

    def replica(store: VirtualStore) -> SimulatedEngine:
        return SimulatedEngine.of(config, LARGE, None, [store])

    end = simulate([replica(VirtualStore(spec))], [conversation(0, 0, 0.0)]).requests[0].last + seconds
    if what == "redis":
        outcome = simulate([replica(store), replica(store)], [conversation(0, 0, 0.0), conversation(1, 0, end)])
        assert {request.replica for request in outcome.requests} == {0, 1}
    else:
        ends = {"kills": (Kill(end),)} if what == KILLED else {"rollout": Rollout(end)}
        jobs = [conversation(0, 0, 0.0), conversation(1, 0, 20.0)]
        successor = partial(replica, VirtualStore(spec))
        outcome = simulate([replica(store)], jobs, incidents=Incidents(**ends, startup=1.0), successor=successor)
    assert outcome.requests[1].cached == cached


arrivals = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1400), st.floats(0, 2)), min_size=1, max_size=12)
specs = st.builds(
    TierSpec,
    st.sampled_from(["host", "disk", "redis"]),
    st.integers(1, 12 * MIB),
    st.floats(1e6, 1e10),
    st.floats(0, 0.5),
)


@given(arrivals, st.lists(specs, min_size=1, max_size=2), st.booleans(), st.integers(129, 400))
def test_every_request_gets_its_tokens_whatever_the_tiers_do(load, tiers, overlap, blocks):
    """`Simulation.run` checks that; `simulate` that no block is lost."""
    options = {"max_model_len": 2048, "num_gpu_blocks_override": blocks, "async_scheduling": overlap}
    replica = SimulatedEngine.of(LARGE.config(options), LARGE, None, [VirtualStore(tier) for tier in tiers])
    due = sorted(load, key=lambda one: one[2])
    jobs = [conversation(n, number, when, tokens) for n, (number, tokens, when) in enumerate(due)]
    simulate([replica], jobs)
    assert all(store.num_bytes <= store.spec.size for store in replica.kv_tiers.stores)


@pytest.mark.parametrize(
    "text",
    ["disk", "disk:1GiB:1GB/s", "disk:1GiB:1GB:1ms", "tape:1GiB:1GB/s:1ms", "disk:1GiB:1GB/s:1", "disk:1GiB:1GB/s:1h"],
)
def test_what_is_not_a_tier_is_rejected(text):
    with pytest.raises(ConfigError, match=r'expected TYPE:SIZE:RATE:LATENCY.*for "lmcache", give the type'):
        parse_kv_tier(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-tier", "disk:many:1GB/s:1ms"], "cannot read 'many' as a size"),
        (["--kv-tier", "disk:0:1GB/s:1ms"], "size and rate must be more than 0"),
        (["--kv-tier", FAST, "--set", "enable_prefix_caching=false"], "needs enable_prefix_caching=true"),
    ],
)
def test_a_tier_that_cannot_be_used_is_rejected(arguments, message):
    result = CliRunner().invoke(app, ["simulate", "--profile", "demo-cpu", "--requests", "1", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
