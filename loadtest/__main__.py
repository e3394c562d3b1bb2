"""`python -m loadtest`.  Exit status: 0 success, 1 failure, 2 wrong input (nothing was run), 130 stopped."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from inflight.config import ConfigError
from inflight_tools.installation import LauncherError
from inflight_tools.repository import parse_setting
from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.scenarios import SCENARIOS, Scenario
from inflight_tools.workload.slo import SLO
from loadtest.errors import LoadTestError
from loadtest.options import LoadOptions
from loadtest.report import render
from loadtest.results import build, write
from loadtest.runner import Plan, Results, run
from loadtest.server import BASELINE, DEFAULT_CHECKPOINT, INFLIGHT, Endpoints
from loadtest.targets import Target, find_targets, server_targets

app = typer.Typer(
    help="Load test of Inflight and Triton's dynamic batcher, or of any one or two endpoints, with a report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Engine options of a run unless --set overrides them: 40 users fit one batch.
_ENGINE = {"dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_cache_memory": "2GiB"}
_SWEEP = "0.4,0.7,1.0,1.5"

_Protocol = Annotated[
    str | None, typer.Option(help="grpc or http (/generate_stream).", show_default="what --url speaks, else grpc")
]
_EACH = "; once for each --url"
_Urls = Annotated[
    list[str] | None,
    typer.Option(help="A running Triton, gateway, vLLM or other server with OpenAI's API; twice: side by side."),
]
_Kinds = Annotated[list[str] | None, typer.Option(help=f"grpc, http (Triton's) or openai, if not asked{_EACH}.")]
_Names = Annotated[list[str] | None, typer.Option(help=f"Name in the report{_EACH}.")]
_Models = Annotated[list[str] | None, typer.Option(help=f"Its model, by default its only one{_EACH}.")]
_Keys = Annotated[list[str] | None, typer.Option(help=f"Its API key, by default $OPENAI_API_KEY{_EACH}.")]
_Metrics = Annotated[list[str] | None, typer.Option(help=f"Its Prometheus metrics, if not where usual{_EACH}.")]


@app.command("run")
def run_(
    scenario: Annotated[str, typer.Option(help=f"One of {', '.join(SCENARIOS)}.")] = "lognormal",
    trace: Annotated[str, typer.Option(help="Replay this CSV or JSONL file instead.")] = "",
    speed: Annotated[float, typer.Option(help="Replay the trace this many times as fast.")] = 1.0,
    checkpoint: Annotated[str, typer.Option(help="demo, llama-60m-rand or a checkpoint folder.")] = DEFAULT_CHECKPOINT,
    rounds: Annotated[int, typer.Option(help="Rounds of each model or endpoint.", min=1)] = 2,
    requests: Annotated[int, typer.Option(help="Requests per round; 0 uses the scenario's number.", min=0)] = 0,
    users: Annotated[int, typer.Option(help="Users of a closed loop; 0 uses the scenario's number.", min=0)] = 0,
    arrivals: Annotated[str, typer.Option(help="closed, poisson, gamma or constant; empty uses the scenario's.")] = "",
    rate: Annotated[float, typer.Option(help="Requests per second of an open loop.", min=0)] = 0.0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 2.0,
    sweep: Annotated[str, typer.Option(help="Offered loads as shares of each model's capacity.")] = _SWEEP,
    sweep_seconds: Annotated[float, typer.Option(help="Seconds of arrivals per step of the sweep.", min=1)] = 12.0,
    context: Annotated[int, typer.Option(help="Scale the scenario to this many tokens.", min=0)] = 0,
    prompt: Annotated[str, typer.Option(help="auto, ids, words, or text of exactly as many tokens.")] = "auto",
    tokenizer: Annotated[str, typer.Option(help="Checkpoint folder, for --url with --prompt text.")] = "",
    adapters: Annotated[str, typer.Option(help="LoRA adapters between commas, in turn; an empty one: none.")] = "",
    protocol: _Protocol = None,
    seed: Annotated[int, typer.Option(help="The same seed repeats the requests.")] = 1,
    slo_ttft: Annotated[float, typer.Option(help="SLO: seconds to the first text.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="SLO: seconds per further token.")] = 0.25,
    url: _Urls = None,
    kind: _Kinds = None,
    name: _Names = None,
    model: _Models = None,
    api_key: _Keys = None,
    metrics: _Metrics = None,
    grpc: Annotated[str, typer.Option(help="Triton's gRPC address, if not derived from --url; for --models.")] = "",
    http: Annotated[str, typer.Option(help="Triton's HTTP address, if not derived from --url; for --models.")] = "",
    models: Annotated[str, typer.Option(help="Inflight's model and its baseline, on one running Triton.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of model.json.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds for the whole run; what does not fit is left out.")] = 570.0,
    note: Annotated[list[str] | None, typer.Option(help="A sentence for the report; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default: loadtest/results/SCENARIO.")] = None,
) -> None:
    """Run a scenario against both models on a new server, or against running endpoints; write report.html and .json."""
    # SIGTERM stops what was started, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _one_line_errors():
        load = LoadOptions(
            scenario=scenario, trace=trace, speed=speed, seed=seed, requests=requests, arrivals=arrivals, rate=rate,
            cv=cv, context=context, prompt=prompt, tokenizer=tokenizer, adapters=adapters,
        )  # fmt: skip
        pair = bool(models or grpc or http)
        if pair:
            targets: tuple[Target, ...] = _pair(url or [], metrics or [], grpc, http, models, protocol)
        else:
            targets = find_targets(url or [], kind or [], name or [], model or [], api_key or [], metrics or [])
        plan = Plan(
            load=load,
            targets=targets,
            against_batcher=pair or not targets,
            protocol=_one_of("protocol", protocol or "grpc", ("grpc", "http")),
            users=users,
            rounds=rounds,
            sweep=_shares(sweep),
            sweep_seconds=sweep_seconds,
            slo=SLO(slo_ttft, slo_tpot),
            checkpoint=checkpoint,
            options=_engine_options(set_ or []),
            budget=budget,
            output=output or Path("loadtest/results") / (Path(trace).stem if trace else scenario),
        )
        results = run(plan, lambda line: typer.echo(line))
    _report(results, note or [])


@app.command("render")
def render_(report: Annotated[Path, typer.Argument(help="A report.json.")]) -> None:
    """Write report.html again from a report.json."""
    try:
        data = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _fail(f"{report}: {error}; give a report.json that `run` wrote", 2)
    page = report.with_name("report.html")
    page.write_text(render(data), encoding="utf-8")
    typer.echo(f"wrote {page}")


@app.command("scenarios")
def scenarios_() -> None:
    """List the scenarios."""
    for scenario in SCENARIOS.values():
        typer.echo(f"{scenario.name:<11} {scenario.about} (longest request {scenario.longest} tokens{_open(scenario)})")


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except WorkloadError as error:
        _fail(str(error), 2)
    except LauncherError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("stopped", 130)


def _report(results: Results, notes: list[str]) -> None:
    """Write the report and print its ratios."""
    data = build(results, shlex.join(["python", "-m", "loadtest", *_without_keys(sys.argv[1:])]), notes)
    page = write(data, results.plan.output)
    for ratio in data["ratios"]:
        if ratio["ratio"] is not None:
            typer.echo(f"{ratio['what']:<36} {ratio['ratio']:6.2f}x")
    typer.echo(f"wrote {page}")


def _open(scenario: Scenario) -> str:
    return "" if scenario.arrivals == "closed" else f", {scenario.arrivals} arrivals"


def _without_keys(arguments: list[str]) -> list[str]:
    """The arguments with `...` for each API key."""
    hidden = [
        "..." if before == "--api-key" else "--api-key=..." if argument.startswith("--api-key=") else argument
        for before, argument in itertools.pairwise(arguments)
    ]
    return [*arguments[:1], *hidden]


def _two(text: str) -> tuple[str, str]:
    names = text.split(",")
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise LoadTestError(f"--models {text!r}: give two names, such as {INFLIGHT},{BASELINE}")
    return names[0], names[1]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise LoadTestError(f"--{name} {value!r}: must be one of {', '.join(allowed)}")
    return value


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(sorted(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        shares = (-1.0,)
    if any(share <= 0 for share in shares):
        raise LoadTestError(f"--sweep {text!r}: give shares of the capacity above 0, such as {_SWEEP}")
    return shares


def _engine_options(settings: list[str]) -> dict[str, Any]:
    try:
        return {**_ENGINE, **dict(map(parse_setting, settings))}
    except ConfigError as error:
        raise LoadTestError(str(error)) from None


def _pair(
    urls: list[str], metrics: list[str], grpc: str, http: str, models: str, protocol: str | None
) -> tuple[Target, Target]:
    """Inflight's model and its baseline on one running Triton."""
    if len(urls) > 1 or len(metrics) > 1:
        raise LoadTestError("--models compares two models on one Triton: give one --url, or --url twice with --model")
    spoken = "grpc"
    if urls:
        endpoints, spoken = Endpoints.at(urls[0])
    else:
        if not (given := grpc or http):
            raise LoadTestError(f"--models {models!r}: give the address of their Triton with --url")
        host = given.rpartition(":")[0]
        endpoints = Endpoints(f"{host}:8001", f"{host}:8000", f"{host}:8002")
    found = Endpoints(grpc or endpoints.grpc, http or endpoints.http, [*metrics, endpoints.metrics][0])
    spoken = _one_of("protocol", protocol or spoken, ("grpc", "http"))
    return server_targets(found, spoken, _two(models or f"{INFLIGHT},{BASELINE}"))


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"loadtest: {message}", err=True)
    raise typer.Exit(status)


if __name__ == "__main__":
    app(prog_name="python -m loadtest")
