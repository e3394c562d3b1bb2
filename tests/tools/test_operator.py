"""`inflight status` and `inflight drain` without a server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from inflight.engine.deltas import StepStats, TierStats, TierTotals
from inflight_client.errors import ServerError, ServerUnreachableError
from inflight_tools import cli, operator
from inflight_tools.operator import status_table


def load(**values: int) -> dict[str, Any]:
    return {**dict.fromkeys(StepStats.__struct_fields__, 0), **values}


def answer(**changes: Any) -> dict[str, Any]:
    frontend = {
        "pid": 10,
        "uptime_seconds": 3700.0,
        "open_requests": 3,
        "open_sequences": 5,
        "requests": {"finished": 12, "refused": 1},
        "engine_deaths": 2,
        "engine_restarts": 2,
        "replays": 7,
        "seconds_since_step": 65.0,
        "last_step": load(running=4, blocks_used=3, blocks_free=1),
    }
    engine = {
        "pid": 11,
        "uptime_seconds": 12.34,
        "async_scheduling": False,
        "max_num_batched_tokens": 2048,
        "load": load(running=2, waiting=3, blocks_used=1, blocks_free=7, prefix_queries_total=50, prefix_hits_total=20),
        "tenants": None,
        "num_tenants": None,
    }
    found = {
        "model": "m",
        "version": "1",
        "instance": "m_0_0",
        "state": "ready",
        "reason": None,
        "inflight": "0.1.0",
        "checkpoint": "org/name",
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "cpu",
        "max_model_len": 64,
        "num_blocks": 8,
        "block_size": 16,
        "frontend": frontend,
        "engine": engine,
    }
    return {**found, **changes}


def test_the_table_says_all_that_the_answer_does() -> None:
    text = status_table(answer())
    for part in (
        "m version 1 (m_0_0), org/name",
        "float32 on cpu, cpu attention, max_model_len 64, steps of 2048 tokens; inflight 0.1.0",
        "frontend 1 h 1 min (pid 10), engine 12.3 s (pid 11)",
        "3 requests, 5 sequences",
        "2 running, 3 waiting, 0 preemptions",
        "1 of 8 used (12.5%)",
        "40.0% of 50 prompt tokens found in the cache",
        "12 finished, 1 refused",
        "2 engine deaths, 2 restarts, 7 replays",
    ):
        assert part in text
    assert "swap" not in text and "tenants" not in text and "ahead" not in text
    engine = answer()["engine"] | {"async_scheduling": True}
    assert "max_model_len 64, steps of 2048 tokens, launched ahead; inflight 0.1.0" in status_table(
        answer(engine=engine)
    )


def test_tenants_and_swap_show_where_they_are_on() -> None:
    engine = answer()["engine"]
    engine |= {"tenants": {"gold": {"running": 1, "waiting": 2}}, "num_tenants": 1}
    engine["load"] |= {"swapped_out_total": 4, "host_blocks_used": 3}
    text = status_table(answer(engine=engine))
    assert "'gold': 1 running, 2 waiting" in text
    assert "3 host blocks used, 4 swapped out, 0 swapped in" in text


def test_kv_tiers_show_where_there_are_any() -> None:
    disk = TierStats("disk", True, 3 * 2**20, 1.5, 8, 20, 1, {"torn": 1, "io": 2})
    totals = TierTotals(200, 50, [disk, TierStats("redis", False, 0, 0.0, 0, 0, 0, {})])
    engine = answer()["engine"]
    assert "KV tiers" not in status_table(answer())
    engine["load"] |= {"kv_tiers": msgspec.to_builtins(totals)}
    text = status_table(answer(engine=engine))
    assert "25.0% of 200 prompt tokens" in text
    assert "disk: 3 MiB, 8 extents read, 20 written; errors: 2 io, 1 torn" in text
    assert "redis: off after errors; 0 extents read, 0 written" in text


def test_without_an_engine_the_table_says_so_and_shows_the_last_step() -> None:
    text = status_table(answer(engine=None, state="restarting", reason="the engine process is being restarted"))
    assert "restarting: the engine process is being restarted" in text
    assert "engine not available" in text and "1 min 5 s ago" in text and "4 running" in text
    frontend = {**answer()["frontend"], "last_step": None, "seconds_since_step": None}
    assert "ago" not in status_table(answer(engine=None, frontend=frontend))


class Answering:
    """In place of the client."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked: list[tuple[str, str]] = []
        self.admin_key: str | None = None

    def __call__(self, url: str, **options: Any) -> Answering:
        return self

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def control(self, name: str, model: str, timeout: float, admin_key: str | None) -> str:
        self.asked.append((name, model))
        self.admin_key = admin_key
        if isinstance(self.found, Exception):
            raise self.found
        return json.dumps(self.found)


def run(monkeypatch: pytest.MonkeyPatch, found: Any, *arguments: str) -> tuple[Any, Answering]:
    client = Answering(found)
    monkeypatch.setattr(operator, "find_endpoint", lambda url: ("grpc", url))
    monkeypatch.setattr(operator, "Client", client)
    monkeypatch.setattr(operator, "key_of", lambda url: None)
    monkeypatch.setattr(operator, "sole_model", lambda url, protocol, key: "the only one")
    return CliRunner().invoke(cli.app, list(arguments)), client


def test_the_commands_ask_and_print(monkeypatch: pytest.MonkeyPatch) -> None:
    result, client = run(monkeypatch, answer(), "status", "--model", "m")
    assert result.exit_code == 0 and result.output.strip() == status_table(answer())
    assert client.asked == [("stats", "m")]
    result, _ = run(monkeypatch, answer(), "status", "--json")
    assert json.loads(result.output) == answer()
    result, client = run(monkeypatch, {"finished": 3, "ended": 1, "seconds": 2.04}, "drain")
    assert client.asked == [("drain", "the only one")]
    assert result.output.strip() == "drained in 2.0 s: 3 requests finished, 1 were ended"


@pytest.mark.parametrize("command", ["status", "drain"])
def test_the_commands_send_the_admin_key(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.delenv("INFLIGHT_ADMIN_KEY", raising=False)
    found = {**answer(), "finished": 3, "ended": 1, "seconds": 2.04}
    assert run(monkeypatch, found, command)[1].admin_key is None
    assert run(monkeypatch, found, command, "--admin-key", "the key")[1].admin_key == "the key"
    monkeypatch.setenv("INFLIGHT_ADMIN_KEY", "from outside")
    assert run(monkeypatch, found, command)[1].admin_key == "from outside"


@pytest.mark.parametrize(("error", "status"), [(ServerUnreachableError("no"), 2), (ServerError("no"), 1)])
def test_failures_are_one_line_and_a_status(monkeypatch: pytest.MonkeyPatch, error: Exception, status: int) -> None:
    result, _ = run(monkeypatch, error, "status")
    assert result.exit_code == status and result.output.strip() == "inflight: no"


INDEX = [
    {"name": "a", "version": "1", "state": "READY", "reason": ""},
    {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
]


def test_models_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "models_at", lambda url, protocol, key: INDEX)
    assert run(monkeypatch, None, "models")[0].output == "a  1  READY\nb  1  UNAVAILABLE  unloaded\n"
    assert json.loads(run(monkeypatch, None, "models", "--json")[0].output) == INDEX
    monkeypatch.setattr(operator, "models_at", lambda url, protocol, key: [])
    assert run(monkeypatch, None, "models")[0].output == "no models\n"
