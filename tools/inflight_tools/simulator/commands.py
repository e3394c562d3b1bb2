"""`inflight calibrate` and `inflight simulate`.

Exit status: 0 success, 1 failure or no setting meets the SLO, 2 wrong input (nothing was run).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from inflight.config import ConfigError, EngineConfig
from inflight.model_json import read_model_json
from inflight_tools.repository import parse_setting, resolve_model
from inflight_tools.simulator.comparison import compare, comparison_table, target_ms
from inflight_tools.simulator.incidents import Incidents, Rollout, parse_kill
from inflight_tools.simulator.kv_tier import parse_kv_tier
from inflight_tools.simulator.peer_link import parse_link
from inflight_tools.simulator.profile import Profile, find_profile
from inflight_tools.simulator.report import summarise, table
from inflight_tools.simulator.router import ROUTERS
from inflight_tools.simulator.scene import Prefills, Scene
from inflight_tools.simulator.sizing import MAX_REPLICAS, find_size
from inflight_tools.simulator.sweep import Trial, best, highest_rate, parse_sweep, settings
from inflight_tools.simulator.values_file import values_yaml
from inflight_tools.terminal import fail
from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.load import Load
from inflight_tools.workload.scenarios import SCENARIOS
from inflight_tools.workload.slo import SLO

__all__ = ["calibrate", "simulate"]

_Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of model.json; repeatable.")]
_Config = Annotated[Path | None, typer.Option("--config", help="model.json to start from.")]


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write (.json).")],
    model: Annotated[str | None, typer.Option(help="Checkpoint directory or hub id.")] = None,
    config: _Config = None,
    set_: _Set = None,
    seconds: Annotated[float, typer.Option(min=0, help="Measure for about this long, at least three rounds.")] = 30.0,
    check: Annotated[bool, typer.Option("--check", help="Then compare a real run with a simulated one.")] = False,
) -> None:
    """Measure the cost of a step on this machine.  The result is a profile for `inflight simulate`."""
    with _usage_errors():
        if output.suffix != ".json":
            raise ConfigError(f"--output {output}: must be a .json file")
        options = _engine_options(model, config, set_ or [])
        engine_config = EngineConfig.from_dict(options, source="command line")
        try:
            from inflight_tools.simulator import calibrate as measuring

            core = measuring.load_engine(engine_config)
        except ModuleNotFoundError as error:
            fail(f"{error.name} not found; calibrate runs the engine: pip install 'triton-inflight[backend]'")
        except RuntimeError as error:
            fail(str(error))
        profile = measuring.calibrate(core, output.stem, seconds, lambda line: typer.echo(line, err=True))
    _write(output, (msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n").decode())
    typer.echo(
        f"{profile.fit.batches} kinds of batches, mean error of the fit "
        f"{100 * profile.fit.mean:.0f}%; {profile.machine}"
    )
    if check:
        _check(core, profile)


def _check(core: Any, profile: Profile) -> None:
    from inflight_tools.simulator.check import compare

    load = Load(scenario="lognormal", requests=48, context=core.info.max_model_len)
    predicted, measured = compare(core, profile, load, users=16)
    ratio = predicted.tokens_per_second / measured.tokens_per_second
    typer.echo(
        f"predicted {predicted.tokens_per_second:.0f} tokens/s, measured {measured.tokens_per_second:.0f}: "
        f"{100 * (ratio - 1):+.1f}%"
    )


def simulate(
    profile: Annotated[str, typer.Option(help="Shipped profile, or a file from `inflight calibrate`.")],
    scenario: Annotated[str, typer.Option(help=f"One of {', '.join(SCENARIOS)}.")] = "lognormal",
    trace: Annotated[str, typer.Option(help="Replay this CSV or JSONL file instead.")] = "",
    speed: Annotated[float, typer.Option(help="Replay the trace this many times as fast.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="Number of requests; 0 uses the scenario's.")] = 0,
    users: Annotated[int, typer.Option(min=0, help="Users of a closed loop; 0 uses the scenario's.")] = 0,
    arrivals: Annotated[str, typer.Option(help="closed, poisson, gamma or constant; empty uses the scenario's.")] = "",
    rate: Annotated[float, typer.Option(min=0, help="Requests per second of an open loop.")] = 0.0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 2.0,
    context: Annotated[
        int, typer.Option(min=0, help="Scale the load to this many tokens; 0: the model's context.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed repeats the load.")] = 1,
    config: _Config = None,
    set_: _Set = None,
    replicas: Annotated[int, typer.Option(min=1, max=10_000, help="Engines behind the router.")] = 1,
    router: Annotated[str, typer.Option(help=f"One of {', '.join(ROUTERS)}.")] = "least-loaded",
    scrape_interval: Annotated[
        float, typer.Option(min=0, help="Seconds between two looks of least-waiting at the gauges; 0: always current.")
    ] = 0.0,
    accepted_drafts: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Chance of a draft to be accepted, with --set speculative_config=..."),
    ] = None,
    kv_tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:SIZE:RATE:LATENCY",
            help="Keep KV beyond the pool: disk:100GiB:1.6GB/s:0.2ms; host, disk or redis; repeatable, fastest first.",
        ),
    ] = None,
    prefill_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Beside --replicas: engines that compute only prompts, compared with as many that do both.",
        ),
    ] = None,
    handover_link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE:LATENCY",
            help="With --prefill-replicas: the network of each replica (1.25GB/s:0.2ms).",
        ),
    ] = None,
    handover: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N|off", help="With --prefill-replicas: which prompts, as `inflight gateway --handover`."
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="SECONDS[:REPLICA]", help="The replica (0, if none is named) dies then; repeatable."),
    ] = None,
    rollout: Annotated[
        float | None, typer.Option(min=0, help="Restart all replicas in turn from this second on.")
    ] = None,
    max_unavailable: Annotated[int, typer.Option(min=1, help="Replicas that a rollout takes out at once.")] = 1,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that a rollout gives open requests to end.")] = 30.0,
    startup: Annotated[
        float, typer.Option(min=0, help="Seconds until a killed or restarted replica is ready; inf: never.")
    ] = 60.0,
    slo_ttft: Annotated[float, typer.Option(min=0, help="SLO: seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(min=0, help="SLO: seconds per further token.")] = 0.25,
    slo_itl: Annotated[
        float, typer.Option(min=0, help="SLO: seconds of a request's longest gap; inf: any.")
    ] = math.inf,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="SLO: share of requests that must meet it.")] = 0.9,
    find_replicas: Annotated[
        bool, typer.Option("--find-replicas", help="Find the fewest replicas that meet the SLO.")
    ] = False,
    survive: Annotated[
        int, typer.Option(min=0, help="With --find-replicas: lost replicas with which the SLO must still be met.")
    ] = 0,
    values: Annotated[
        Path | None, typer.Option(help="With --find-replicas: write the Helm chart's values to this file.")
    ] = None,
    sweep: Annotated[str, typer.Option(help="KEY=VALUES to try, comma-separated; a..b doubles from a to b.")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best setting to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """Simulate a load with measured costs.  The real scheduler runs it on a virtual clock."""
    with _usage_errors():
        if output is not None and not sweep:
            raise ConfigError("--output receives the best setting of a sweep; also give --sweep KEY=VALUES")
        if (values is not None or survive) and not find_replicas:
            raise ConfigError("--values and --survive belong to --find-replicas; give it, or leave them out")
        if find_replicas and (sweep or kill or rollout is not None):
            raise ConfigError("--find-replicas takes no --sweep, --kill or --rollout; --survive N loses replicas")
        prefills = _prefills(prefill_replicas, handover_link, handover)
        if prefills is not None and (sweep or find_replicas):
            raise ConfigError("--prefill-replicas is a comparison of its own; leave out --sweep and --find-replicas")
        found = find_profile(profile)
        options = _engine_options(None, config, set_ or [], needs_model=False)
        load = Load(
            scenario=scenario, trace=trace, speed=speed, seed=seed, requests=requests, arrivals=arrivals, rate=rate,
            cv=cv, context=context or found.config(options).max_model_len or found.max_model_len,
        )  # fmt: skip
        incidents = Incidents(
            tuple(map(parse_kill, kill or [])),
            None if rollout is None else Rollout(rollout, max_unavailable, grace),
            startup,
        )
        tiers = tuple(map(parse_kv_tier, kv_tier or []))
        scene = Scene(
            found, options, load, users, replicas, router, incidents, scrape_interval, accepted_drafts, tiers, prefills
        )
        scene.check()
        slo = SLO(slo_ttft, slo_tpot, attainment, slo_itl)
        if prefills is not None:
            target_ms(scene, slo)
        if sweep:
            _sweep(scene, slo, parse_sweep(sweep), output, report)
            return
        if find_replicas:
            _find_replicas(scene, slo, survive, values, report)
            return
    if prefills is not None:
        trials = compare(scene, slo, lambda line: typer.echo(line, err=True))
        typer.echo(comparison_table(trials, slo))
        _write_report(report, trials)
        return
    summary = summarise(scene.run(), slo)
    typer.echo(table(summary, slo))
    _write_report(report, [Trial({}, summary)])


def _prefills(replicas: int | None, link: str | None, handover: str | None) -> Prefills | None:
    if replicas is None:
        for name, value in (("--handover-link", link), ("--handover", handover)):
            if value is not None:
                raise ConfigError(f"{name} {value!r} needs replicas for prompts: also give --prefill-replicas N")
        return None
    return Prefills(replicas, parse_link(link or "1.25GB/s:0.2ms"), handover or "auto")


def _find_replicas(scene: Scene, slo: SLO, survive: int, values: Path | None, report: Path | None) -> None:
    size = find_size(scene, slo, survive, lambda line: typer.echo(line, err=True))
    if size is None:
        fail(
            f"no number of replicas up to {MAX_REPLICAS} answers {_slo_in_words(slo)}; relax the SLO, or change the "
            "engine's options (--sweep)"
        )
    _write_report(report, [Trial({"replicas": size.replicas}, size.report, scene.load.rate)])
    lost = f", also if {survive} of them are lost" if survive else ""
    typer.echo(f"{size.replicas} replicas{lost}; {size.minimum} at half the load, {size.maximum} at twice the load")
    typer.echo(table(size.report, slo))
    if values is not None:
        _write(values, values_yaml(size, scene.in_words(), _slo_in_words(slo)))


def _slo_in_words(slo: SLO) -> str:
    return f"{100 * slo.attainment:g}% of the requests within {slo.ttft:g} s and {1000 * slo.tpot:g} ms per token"


def _sweep(scene: Scene, slo: SLO, values: dict[str, list[Any]], output: Path | None, report: Path | None) -> None:
    scenes = [(setting, scene.with_values(setting)) for setting in settings(values)]
    for _, one in scenes:
        one.check()
    searches = scene.load.process() in ("poisson", "gamma", "constant")
    trials = []
    for setting, one in scenes:
        if searches:
            trial = highest_rate(partial(_trial_at, one, slo, setting), scene.load.rate or 1.0, slo)
        else:
            trial = _trial(one, slo, setting)
        trials.append(trial)
        typer.echo(_line(trial, slo))
    _write_report(report, trials)
    winner = best(trials, slo)
    if winner is None:
        fail(f"no setting answers {_slo_in_words(slo)}; reduce the load, relax the SLO or try other values")
    typer.echo(f"best: {_named(winner.setting)}\n{table(winner.report, slo)}")
    if output is not None:
        _write(output, json.dumps({**scene.model_json(), **winner.setting}, indent=2) + "\n")


def _trial(scene: Scene, slo: SLO, setting: dict[str, Any]) -> Trial:
    return Trial(setting, summarise(scene.run(), slo), scene.load.rate)


def _trial_at(scene: Scene, slo: SLO, setting: dict[str, Any], rate: float) -> Trial:
    return _trial(scene.at_rate(rate), slo, setting)


def _line(trial: Trial, slo: SLO) -> str:
    summary = trial.report
    rate = f" at {trial.rate:.2f} requests/s" if trial.rate else ""
    verdict = "meets the SLO" if trial.meets(slo) else "misses the SLO"
    return (
        f"{_named(trial.setting)}: {verdict}{rate}, {100 * summary.attainment:.1f}% good, goodput "
        f"{summary.goodput:.2f} requests/s, {summary.tokens_per_second:.0f} tokens/s, "
        f"TTFT p95 {summary.ttft.p95:.2f} s, ITL p99 {1000 * summary.itl.p99:.0f} ms"
    )


def _named(setting: dict[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in setting.items())


def _engine_options(
    model: str | None, config: Path | None, set_: list[str], needs_model: bool = True
) -> dict[str, Any]:
    """Keys of `model.json` from the command line: those of a file, overridden by the model and `--set`."""
    values: dict[str, Any] = {}
    if config is not None:
        loaded = read_model_json(config)
        given = json.loads(config.read_text(encoding="utf-8"))
        values = {key: getattr(loaded, key) if key in ("model", "tokenizer") else given[key] for key in given}
    if model is not None:
        values["model"] = resolve_model(model)
    values.update(map(parse_setting, set_))
    if needs_model and "model" not in values:
        raise ConfigError("give --model CHECKPOINT, or --config model.json")
    return values


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    typer.echo(f"wrote {path}")


def _write_report(path: Path | None, trials: list[Trial]) -> None:
    if path is not None:
        rows = [{"setting": one.setting, "rate": one.rate, **msgspec.to_builtins(one.report)} for one in trials]
        _write(path, json.dumps(rows, indent=1) + "\n")


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except (ConfigError, WorkloadError) as error:
        fail(str(error), 2)
