"""A measured run: one or two endpoints in alternating rounds, then a sweep of the offered load."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inflight_tools.launcher import TritonServer
from inflight_tools.workload.scenarios import Scenario
from inflight_tools.workload.slo import SLO
from loadtest.analysis import Phase, read_phase
from loadtest.errors import LoadTestError
from loadtest.monitor import Monitor, scrape
from loadtest.openai_client import KEY_VARIABLE
from loadtest.options import LoadOptions
from loadtest.server import BASELINE, INFLIGHT, Endpoints, checkpoint_folder, model_context, write_repository
from loadtest.targets import Target, server_targets

__all__ = ["Plan", "Results", "run", "sweep_process"]

_HERE = Path(__file__).parent
_SEED_STEP = 1000  # between rounds, so that no round finds the prompts of another in a cache
_IDLE_SECONDS = 120.0
_MIN_SWEEP_REQUESTS = 8  # per step
_SWEEP_SHARE = 0.35  # of the budget, reserved for the sweep


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        load: the requests of a round; each round draws its own from `load.seed`.
        targets: endpoints that are running already; none: start a server with Inflight's model and its baseline.
        against_batcher: the targets are Inflight's model and Triton's batcher on one server.
        protocol: "grpc" or "http", for a server that is started.
        users: of a closed loop; 0 uses the scenario's number.
        rounds: rounds of each target.
        sweep: offered loads as shares of each target's measured throughput; empty for no sweep.
        sweep_seconds: seconds of arrivals per step of the sweep.
        checkpoint: see `server.checkpoint_folder`.
        options: further keys of Inflight's `model.json`.
        budget: seconds for the whole run; rounds after the first and steps of the sweep that do not fit
            are left out.
        output: folder of records, logs and report.
    """

    load: LoadOptions
    targets: tuple[Target, ...] = ()
    against_batcher: bool = True
    protocol: str = "grpc"
    users: int = 0
    rounds: int = 2
    sweep: tuple[float, ...] = ()
    sweep_seconds: float = 12.0
    slo: SLO = field(default_factory=SLO)
    checkpoint: str = "llama-60m-rand"
    options: dict[str, Any] = field(default_factory=dict)
    budget: float = 570.0
    output: Path = Path("loadtest/results/latest")


@dataclass
class Results:
    """Phases by the keys of the targets; those of `sweep` in the order in which they ran."""

    plan: Plan
    source: Any
    targets: tuple[Target, ...]
    rounds: dict[str, list[Phase]] = field(default_factory=dict)
    sweep: dict[str, list[Phase]] = field(default_factory=dict)


def run(plan: Plan, say: Callable[[str], None] = print) -> Results:
    """Run the plan; records and logs stay in `plan.output`.

    Raises:
        LoadTestError: wrong options, no server, no model, or a scenario that does not fit; nothing was run.
        LauncherError: the server could not be started.
    """
    begun = time.monotonic()
    source = plan.load.load()
    plan.load.process()
    if plan.against_batcher and plan.load.adapter_names():
        raise LoadTestError("--adapters: Triton's batcher serves no adapters; give endpoints that do with --url")
    if not plan.targets and source.longest > (context := _context(plan)):
        raise LoadTestError(
            f"{source.name} has requests of {source.longest} tokens, but the model takes {context}; scale it with "
            f"--context {context}, or choose another scenario or checkpoint"
        )
    with _server(plan, say) as (found, load, server):
        targets, load = _checked(found, load)
        plan = dataclasses.replace(plan, load=load)
        bench = _Bench(plan, server, say)
        keys = [target.key for target in targets]
        results = Results(plan, source, targets, {key: [] for key in keys}, {key: [] for key in keys})
        deadline = begun + plan.budget
        bench.rounds(results, deadline - plan.budget * _SWEEP_SHARE if plan.sweep else deadline)
        bench.sweep(results, deadline)
    return results


def _checked(targets: tuple[Target, ...], load: LoadOptions) -> tuple[tuple[Target, ...], LoadOptions]:
    """The targets with what is known about them after a check, and the load with prompts that all of them take."""
    clients = [target.client() for target in targets]
    for target, client in zip(targets, clients):
        found = load.checked(client, target.model)
        load = found if found.prompt == "words" else load
    return tuple(dataclasses.replace(target, traits=client.traits) for target, client in zip(targets, clients)), load


def _context(plan: Plan) -> int:
    return model_context(checkpoint_folder(plan.checkpoint), plan.options)


@contextmanager
def _server(
    plan: Plan, say: Callable[[str], None]
) -> Iterator[tuple[tuple[Target, ...], LoadOptions, TritonServer | None]]:
    """The targets, the load with the checkpoint's tokenizer, and the server if we started it."""
    if plan.targets:
        plan.output.mkdir(parents=True, exist_ok=True)
        yield plan.targets, plan.load, None
        return
    folder = checkpoint_folder(plan.checkpoint)
    plan.output.mkdir(parents=True, exist_ok=True)
    load = plan.load if plan.load.tokenizer else dataclasses.replace(plan.load, tokenizer=str(folder))
    with TemporaryDirectory(prefix="inflight-loadtest-") as temporary:
        write_repository(Path(temporary), folder, plan.options)
        say(f"starting a server with both models ({folder.name})")
        # The load generator shares the cores; threads that spin while waiting would delay it and each other.
        env = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        log = plan.output / "server.log"
        with TritonServer(temporary, exit_timeout=5, env=env, log_file=log) as server:
            yield server_targets(Endpoints.of(server), plan.protocol, (INFLIGHT, BASELINE)), load, server


class _Bench:
    """Loads on one target at a time."""

    def __init__(self, plan: Plan, server: TritonServer | None, say: Callable[[str], None]) -> None:
        self._plan, self._server, self._say = plan, server, say
        self._source = plan.load.load()
        self._ramp = isinstance(self._source, Scenario) and bool(self._source.ramp)

    def rounds(self, results: Results, deadline: float) -> None:
        """Alternate between the targets; a round that would end after `deadline` is left out."""
        took = 0.0
        for number in range(self._plan.rounds):
            start = time.monotonic()
            if start + took > deadline:
                self._say(f"budget spent after {number} of {self._plan.rounds} rounds (--budget)")
                return
            for target in results.targets:
                results.rounds[target.key].append(self._round(target, number))
            took = time.monotonic() - start

    def _round(self, target: Target, number: int) -> Phase:
        load = dataclasses.replace(self._plan.load, seed=self._plan.load.seed + _SEED_STEP * number)
        if self._ramp:
            load = dataclasses.replace(load, requests=-1)
        phase = self._run(target, load, f"round {number + 1}/{self._plan.rounds}", f"round{number + 1}")
        self._say(f"{_line(phase)}  {phase.saturated_tokens_per_second:7.1f} tokens/s")
        return phase

    def sweep(self, results: Results, deadline: float) -> None:
        """Offer shares of each target's throughput, so that both are measured below and above their knee."""
        took = 0.0
        for step, share in enumerate(self._plan.sweep):
            start = time.monotonic()
            if start + took > deadline:
                self._say(f"budget spent after {step} of {len(self._plan.sweep)} steps of the sweep (--budget)")
                return
            for target in results.targets:
                rate = share * _requests_per_second(results.rounds[target.key])
                if not rate:
                    self._say(f"{target.name} answered nothing: no sweep")
                    continue
                load = dataclasses.replace(
                    self._plan.load,
                    arrivals=sweep_process(self._plan.load),
                    rate=rate,
                    requests=max(_MIN_SWEEP_REQUESTS, round(rate * self._plan.sweep_seconds)),
                    seed=self._plan.load.seed + 500_000 + _SEED_STEP * step,
                )
                phase = self._run(target, load, f"sweep {share:4.2f} of capacity", f"sweep{step + 1}")
                self._say(f"{_line(phase)}  {phase.offered_tokens_per_second:7.1f} tokens/s offered")
                results.sweep[target.key].append(phase)
            took = time.monotonic() - start

    def _run(self, target: Target, load: LoadOptions, label: str, step: str) -> Phase:
        name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', target.key)}-{step}"
        record = self._plan.output / f"{name}.jsonl"
        log = self._plan.output / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(target, load, record, name),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=_environment(target),
            )
            try:
                with Monitor(target, process.pid) as monitor:
                    status = self._wait(process, f"{target.key}, {label}")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if status != 0 or not record.exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            wrong = next((line for line in lines if line.startswith("loadtest: ")), f"{lines[-1]} (see {log})")
            raise LoadTestError(wrong.removeprefix("loadtest: "))
        _wait_until_idle(target)
        expected = None if load.requests < 0 else sum(1 for _ in load.jobs())
        return read_phase(record, target.key, expected=expected, samples=monitor.samples, label=label)

    def _wait(self, process: subprocess.Popen[bytes], what: str) -> int:
        """Exit status of the load; raises if the server that we started dies under it."""
        while process.poll() is None:
            if self._server is not None and not self._server.is_running():
                log = self._plan.output / "server.log"
                raise LoadTestError(f"{what}: {self._server.exit_reason()} (see {log})")
            time.sleep(0.2)
        return process.returncode

    def _command(self, target: Target, load: LoadOptions, record: Path, name: str) -> list[str]:
        closed = load.process() == "closed"
        users = (self._plan.users or getattr(self._source, "users", 40)) if closed else 1
        return [
            *(sys.executable, "-m", "locust", "-f", str(_HERE / "locustfile.py"), "EndpointUser"),
            *("--headless", "--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "0"),
            *("--kind", target.kind, "--host", target.address, "--model", target.model),
            *("--traits", json.dumps(target.traits)),
            *("--users", str(users), "--spawn-rate", str(users), "--stop-timeout", "600"),
            *("--csv", str(self._plan.output / name), "--record", str(record)),
            *load.arguments(),
        ]  # fmt: skip


def _environment(target: Target) -> dict[str, str]:
    """Without Locust's settings of the user, and with the key of no other endpoint."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")}
    if target.api_key is not None:
        environment[KEY_VARIABLE] = target.api_key
    return environment


def _wait_until_idle(target: Target) -> None:
    """Wait until nothing of this load is left for the next one."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < deadline:
        now = scrape(target)
        if not any(now.get(key) for key in ("pending", "running", "waiting")):
            return
        time.sleep(0.5)


def _requests_per_second(phases: list[Phase]) -> float:
    """Throughput of the rounds in requests per second."""
    done = [row for phase in phases for row in phase.done]
    mean_tokens = sum(count for row in done for _, count in row["arrivals"]) / max(1, len(done))
    return sum(phase.saturated_tokens_per_second for phase in phases) / len(phases) / max(1.0, mean_tokens)


def sweep_process(load: LoadOptions) -> str:
    """The arrival process of the sweep's open loops."""
    return load.arrivals if load.arrivals in ("gamma", "constant") else "poisson"


def _line(phase: Phase) -> str:
    lost = f", {phase.lost} LOST" if phase.lost else ""
    return f"{phase.model:<9} {phase.label:<22} {len(phase.rows):4d} requests{lost} in {phase.seconds:6.1f} s"
