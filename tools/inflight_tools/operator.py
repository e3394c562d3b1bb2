"""`inflight models`, `status` and `drain`.

Exit status: 0 success, 1 the server refused or failed, 2 no server or wrong usage.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from inflight_client.client import Client
from inflight_client.command_client import models_at, sole_model
from inflight_client.endpoint import find_endpoint
from inflight_client.errors import InflightError, ServerUnreachableError
from inflight_client.local_servers import key_of
from inflight_tools.admin import ENVIRONMENT
from inflight_tools.terminal import fail

__all__ = ["AdminKey", "Json", "Model", "Url", "drain", "failures", "models", "status", "status_table"]

Url = Annotated[str, typer.Option(help="Triton's gRPC or HTTP address.")]
Model = Annotated[str | None, typer.Option(help="Model to ask.", show_default="the only one of the server")]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar=ENVIRONMENT, help="What the server printed at its start; known if you run it on this machine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def status(url: Url = "127.0.0.1:8001", model: Model = None, json_: Json = False, admin_key: AdminKey = None) -> None:
    """Show what a model does now.  It answers while its engine is down, too.

    Examples: `inflight status`, `inflight status --model qwen --json | jq .engine.load`.
    """
    answer = _ask(url, model, "stats", 10.0, admin_key)
    typer.echo(answer if json_ else status_table(json.loads(answer)))


def drain(
    url: Url = "127.0.0.1:8001",
    model: Model = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; the model's drain_timeout bounds them.")] = 3600.0,
    json_: Json = False,
    admin_key: AdminKey = None,
) -> None:
    """Take no new requests and wait for the open ones.  A drained model serves again once it is reloaded.

    Example: `inflight drain --model qwen --timeout 60`.
    """
    answer = _ask(url, model, "drain", timeout, admin_key)
    found = json.loads(answer)
    typer.echo(
        answer
        if json_
        else f"drained in {found['seconds']:.1f} s: {found['finished']} requests finished, {found['ended']} were ended"
    )


def models(url: Url = "127.0.0.1:8001", json_: Json = False, admin_key: AdminKey = None) -> None:
    """List the models of a server and their states.  If one is not ready, the list says why.

    Examples: `inflight models`, `inflight models --json | jq -r '.[].name'`.
    """
    with failures():
        protocol, url = find_endpoint(url)
        found = models_at(url, protocol, admin_key)
    rows = [[entry[key] for key in ("name", "version", "state", "reason")] for entry in found]
    typer.echo(json.dumps(found) if json_ else "\n".join("  ".join(row).rstrip() for row in rows) or "no models")


def _ask(url: str, model: str | None, control: str, timeout: float, admin_key: str | None) -> str:
    with failures():
        protocol, url = find_endpoint(url)
        key = admin_key or key_of(url)
        asked = model or sole_model(url, protocol, key)
        with Client(url, protocol=protocol) as client:
            return client.control(control, asked, timeout, key)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """One line and an exit status."""
    try:
        yield
    except ServerUnreachableError as error:
        fail(error.message, 2)
    except InflightError as error:
        fail(error.message, 1)
    except ValueError as error:
        fail(str(error), 2)


def status_table(found: dict[str, Any]) -> str:
    """The answer to `control` "stats" as lines of text."""
    frontend, engine = found["frontend"], found["engine"]
    rows = [
        ("model", f"{found['model']} version {found['version']} ({found['instance']}), {found['checkpoint']}"),
        ("state", found["state"] + (f": {found['reason']}" if found["reason"] else "")),
        (
            "engine",
            f"{found['dtype']} on {found['device']}, {found['attention_backend']} attention, "
            f"max_model_len {found['max_model_len']}{_steps(engine)}; inflight {found['inflight']}",
        ),
        (
            "up",
            f"frontend {_duration(frontend['uptime_seconds'])} (pid {frontend['pid']}), engine "
            + (f"{_duration(engine['uptime_seconds'])} (pid {engine['pid']})" if engine else "not available"),
        ),
        ("open", f"{frontend['open_requests']} requests, {frontend['open_sequences']} sequences"),
        *(_load_rows(engine["load"]) if engine else _last_rows(frontend)),
        ("requests", ", ".join(f"{count} {how}" for how, count in sorted(frontend["requests"].items())) or "none yet"),
        (
            "faults",
            f"{frontend['engine_deaths']} engine deaths, {frontend['engine_restarts']} restarts, "
            f"{frontend['replays']} replays",
        ),
    ]
    tenants = engine["tenants"] if engine else None
    if tenants is not None:
        rows.append(("tenants", f"{engine['num_tenants']} with sequences"))
        rows += [("", f"{name!r}: {n['running']} running, {n['waiting']} waiting") for name, n in tenants.items()]
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _steps(engine: dict[str, Any] | None) -> str:
    if engine is None:
        return ""
    ahead = ", launched ahead" if engine["async_scheduling"] else ""
    return f", steps of {engine['max_num_batched_tokens']} tokens{ahead}"


def _load_rows(load: dict[str, Any]) -> list[tuple[str, str]]:
    blocks = load["blocks_used"] + load["blocks_free"]
    queried = load["prefix_queries_total"]
    rows = [
        ("sequences", f"{load['running']} running, {load['waiting']} waiting, {load['preempted_total']} preemptions"),
        ("KV blocks", f"{load['blocks_used']} of {blocks} used ({load['blocks_used'] / max(1, blocks):.1%})"),
        (
            "prefixes",
            f"{load['prefix_hits_total'] / max(1, queried):.1%} of {queried} prompt tokens found in the cache",
        ),
    ]
    if load["swapped_out_total"] or load["host_blocks_used"]:
        swapped = f"{load['swapped_out_total']} swapped out, {load['swapped_in_total']} swapped in"
        rows.append(("swap", f"{load['host_blocks_used']} host blocks used, {swapped}"))
    if load.get("kv_tiers"):
        rows += _tier_rows(load["kv_tiers"])
    return rows


def _tier_rows(totals: dict[str, Any]) -> list[tuple[str, str]]:
    queried = totals["queries_total"]
    rows = [
        (
            "KV tiers",
            f"{totals['hits_total'] / max(1, queried):.1%} of {queried} prompt tokens found that the pool lacked",
        )
    ]
    for tier in totals["tiers"]:
        errors = ", ".join(f"{count} {why}" for why, count in sorted(tier["errors_total"].items()))
        text = f"{tier['tier']}: " + ("" if tier["is_open"] else "off after errors; ")
        text += f"{tier['num_bytes'] / 2**20:.0f} MiB, " if tier["num_bytes"] else ""
        text += f"{tier['loaded_total']} extents read, {tier['stored_total']} written"
        rows.append(("", text + (f"; errors: {errors}" if errors else "")))
    return rows


def _last_rows(frontend: dict[str, Any]) -> list[tuple[str, str]]:
    """The engine's last report, if it does not answer now."""
    if frontend["last_step"] is None:
        return []
    age = _duration(frontend["seconds_since_step"])
    return [("last step", f"{age} ago, and then:"), *_load_rows(frontend["last_step"])]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
