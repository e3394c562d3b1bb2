"""A measured run: both models on one server in alternating rounds, then a sweep of the offered load."""

from __future__ import annotations

import dataclasses
import os
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
from loadtest.clients import connect
from loadtest.errors import LoadTestError
from loadtest.monitor import Monitor, scrape
from loadtest.options import LoadOptions
from loadtest.server import BASELINE, INFLIGHT, Endpoints, checkpoint_folder, model_context, write_repository

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
        models: names on the server, Inflight's first.
        protocol: "grpc" or "http".
        users: of a closed loop; 0 uses the scenario's number.
        rounds: rounds of each model.
        sweep: offered loads as shares of each model's measured throughput; empty for no sweep.
        sweep_seconds: seconds of arrivals per step of the sweep.
        checkpoint: see `server.checkpoint_folder`.
        options: further keys of Inflight's `model.json`.
        endpoints: a running server; None starts one.
        budget: seconds for the whole run; rounds after the first and steps of the sweep that do not fit
            are left out.
        output: folder of records, logs and report.
    """

    load: LoadOptions
    models: tuple[str, str] = (INFLIGHT, BASELINE)
    protocol: str = "grpc"
    users: int = 0
    rounds: int = 2
    sweep: tuple[float, ...] = ()
    sweep_seconds: float = 12.0
    slo: SLO = field(default_factory=SLO)
    checkpoint: str = "llama-60m-rand"
    options: dict[str, Any] = field(default_factory=dict)
    endpoints: Endpoints | None = None
    budget: float = 570.0
    output: Path = Path("loadtest/results/latest")


@dataclass
class Results:
    """Phases by model; those of `sweep` in the order in which they ran."""

    plan: Plan
    source: Any
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
    if plan.endpoints is None and source.longest > (context := _context(plan)):
        raise LoadTestError(
            f"{source.name} has requests of {source.longest} tokens, but the model takes {context}; scale it with "
            f"--context {context}, or choose another scenario or checkpoint"
        )
    with _server(plan, say) as (endpoints, load, server):
        for model in plan.models:
            load.check(connect(plan.protocol, _address(plan, endpoints), model), model)
        bench = _Bench(dataclasses.replace(plan, load=load), endpoints, server, say)
        results = Results(plan, source, {model: [] for model in plan.models}, {model: [] for model in plan.models})
        deadline = begun + plan.budget
        bench.rounds(results, deadline - plan.budget * _SWEEP_SHARE if plan.sweep else deadline)
        bench.sweep(results, deadline)
    return results


def _context(plan: Plan) -> int:
    return model_context(checkpoint_folder(plan.checkpoint), plan.options)


def _address(plan: Plan, endpoints: Endpoints) -> str:
    return endpoints.grpc if plan.protocol == "grpc" else endpoints.http


@contextmanager
def _server(plan: Plan, say: Callable[[str], None]) -> Iterator[tuple[Endpoints, LoadOptions, TritonServer | None]]:
    """The addresses, the load with the checkpoint's tokenizer, and the server if we started it."""
    if plan.endpoints is not None:
        plan.output.mkdir(parents=True, exist_ok=True)
        yield plan.endpoints, plan.load, None
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
            yield Endpoints.of(server), load, server


class _Bench:
    """Loads on one model at a time."""

    def __init__(
        self, plan: Plan, endpoints: Endpoints, server: TritonServer | None, say: Callable[[str], None]
    ) -> None:
        self._plan, self._endpoints, self._server, self._say = plan, endpoints, server, say
        self._source = plan.load.load()
        self._ramp = isinstance(self._source, Scenario) and bool(self._source.ramp)

    def rounds(self, results: Results, deadline: float) -> None:
        """Alternate between the models; a round that would end after `deadline` is left out."""
        took = 0.0
        for number in range(self._plan.rounds):
            start = time.monotonic()
            if start + took > deadline:
                self._say(f"budget spent after {number} of {self._plan.rounds} rounds (--budget)")
                return
            for model in self._plan.models:
                results.rounds[model].append(self._round(model, number))
            took = time.monotonic() - start

    def _round(self, model: str, number: int) -> Phase:
        load = dataclasses.replace(self._plan.load, seed=self._plan.load.seed + _SEED_STEP * number)
        if self._ramp:
            load = dataclasses.replace(load, requests=-1)
        phase = self._run(model, load, f"round {number + 1}/{self._plan.rounds}", f"{model}-round{number + 1}")
        self._say(f"{_line(phase)}  {phase.saturated_tokens_per_second:7.1f} tokens/s")
        return phase

    def sweep(self, results: Results, deadline: float) -> None:
        """Offer shares of each model's throughput, so that both are measured below and above their knee."""
        took = 0.0
        for step, share in enumerate(self._plan.sweep):
            start = time.monotonic()
            if start + took > deadline:
                self._say(f"budget spent after {step} of {len(self._plan.sweep)} steps of the sweep (--budget)")
                return
            for model in self._plan.models:
                rate = share * _requests_per_second(results.rounds[model])
                load = dataclasses.replace(
                    self._plan.load,
                    arrivals=sweep_process(self._plan.load),
                    rate=rate,
                    requests=max(_MIN_SWEEP_REQUESTS, round(rate * self._plan.sweep_seconds)),
                    seed=self._plan.load.seed + 500_000 + _SEED_STEP * step,
                )
                phase = self._run(model, load, f"sweep {share:4.2f} of capacity", f"{model}-sweep{step + 1}")
                self._say(f"{_line(phase)}  {phase.offered_tokens_per_second:7.1f} tokens/s offered")
                results.sweep[model].append(phase)
            took = time.monotonic() - start

    def _run(self, model: str, load: LoadOptions, label: str, name: str) -> Phase:
        record = self._plan.output / f"{name}.jsonl"
        log = self._plan.output / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(model, load, record, name), stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
            try:
                with Monitor(self._endpoints, model, process.pid) as monitor:
                    status = self._wait(process, f"{model}, {label}")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if status != 0 or not record.exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            wrong = next((line for line in lines if line.startswith("loadtest: ")), f"{lines[-1]} (see {log})")
            raise LoadTestError(wrong.removeprefix("loadtest: "))
        self._wait_until_idle(model)
        expected = None if load.requests < 0 else sum(1 for _ in load.jobs())
        return read_phase(record, model, expected=expected, samples=monitor.samples, label=label)

    def _wait(self, process: subprocess.Popen[bytes], what: str) -> int:
        """Exit status of the load; raises if the server that we started dies under it."""
        while process.poll() is None:
            if self._server is not None and not self._server.is_running():
                log = self._plan.output / "server.log"
                raise LoadTestError(f"{what}: {self._server.exit_reason()} (see {log})")
            time.sleep(0.2)
        return process.returncode

    def _command(self, model: str, load: LoadOptions, record: Path, name: str) -> list[str]:
        closed = load.process() == "closed"
        users = (self._plan.users or getattr(self._source, "users", 40)) if closed else 1
        file = "rampfile.py" if self._ramp and closed else "locustfile.py"
        return [
            *(sys.executable, "-m", "locust", "-f", str(_HERE / file)),
            "GrpcUser" if self._plan.protocol == "grpc" else "SseUser",
            *("--headless", "--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "0"),
            *("--host", _address(self._plan, self._endpoints), "--model", model),
            *("--users", str(users), "--spawn-rate", str(users), "--stop-timeout", "600"),
            *("--csv", str(self._plan.output / name), "--record", str(record)),
            *load.arguments(),
        ]  # fmt: skip

    def _wait_until_idle(self, model: str) -> None:
        """Wait until nothing of this load is left for the next one."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while time.monotonic() < deadline:
            now = scrape(self._endpoints.metrics, model)
            if not any(now.get(key) for key in ("pending", "running", "waiting")):
                return
            time.sleep(0.5)


def _requests_per_second(phases: list[Phase]) -> float:
    """Throughput of the rounds in requests per second."""
    done = [row for phase in phases for row in phase.done]
    mean_tokens = sum(row["output_tokens"] for row in done) / max(1, len(done))
    return sum(phase.saturated_tokens_per_second for phase in phases) / len(phases) / max(1.0, mean_tokens)


def sweep_process(load: LoadOptions) -> str:
    """The arrival process of the sweep's open loops."""
    return load.arrivals if load.arrivals in ("gamma", "constant") else "poisson"


def _line(phase: Phase) -> str:
    lost = f", {phase.lost} LOST" if phase.lost else ""
    return f"{phase.model:<9} {phase.label:<22} {len(phase.rows):4d} requests{lost} in {phase.seconds:6.1f} s"
