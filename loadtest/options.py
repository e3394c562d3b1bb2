"""What a load consists of, as options that Locust and the runner share."""

from __future__ import annotations

import itertools
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.arrivals import arrival_times
from loadtest.clients import Client
from loadtest.errors import LoadTestError
from loadtest.prompts import IdPrompts, TextPrompts, load_tokenizer
from loadtest.scenarios import Job, Scenario, find_scenario
from loadtest.traces import Trace, read_trace

__all__ = ["LoadOptions", "add_arguments"]

_PROBE_SEED_SHIFT = 1_000_003  # the probe's prompt must not be the prefix of a measured one


@dataclass(frozen=True)
class LoadOptions:
    """A load, complete but for where it goes.

    Attributes:
        scenario: name of a scenario; ignored when `trace` is given.
        trace: CSV or JSONL file to replay instead.
        speed: the trace's arrivals, this many times as dense.
        seed: repeats lengths, prompts and arrivals.
        requests: how many; 0 takes the scenario's number, -1 is endless.
        arrivals: "closed", "poisson", "gamma", "constant", "trace", or "" for the scenario's own.
        rate: requests per second of an open loop; 0 takes the scenario's.
        cv: coefficient of variation of the gaps of "gamma".
        context: tokens to scale the scenario to; 0 leaves it as it is.
        prompt: "ids" or "text".
        tokenizer: checkpoint folder for "text"; its vocabulary bounds "ids", too.
        vocab_size: bound of random token ids when there is no tokenizer.
    """

    scenario: str = "lognormal"
    trace: str = ""
    speed: float = 1.0
    seed: int = 1
    requests: int = 0
    arrivals: str = ""
    rate: float = 0.0
    cv: float = 2.0
    context: int = 0
    prompt: str = "ids"
    tokenizer: str = ""
    vocab_size: int = 1000

    def load(self) -> Scenario | Trace:
        """The scenario or trace, scaled.

        Raises:
            LoadTestError: an option that cannot be used.
        """
        if self.trace:
            source: Scenario | Trace = read_trace(Path(self.trace), max(self.requests, 0) or None).at_speed(self.speed)
        else:
            source = find_scenario(self.scenario)
        return source.scaled(self.context) if self.context else source

    def process(self) -> str:
        """The arrival process in force."""
        if self.trace:
            return self.arrivals or "trace"
        if self.arrivals == "trace":
            raise LoadTestError("arrivals trace: there is no trace; give one with --trace")
        return self.arrivals or find_scenario(self.scenario).arrivals

    def jobs(self) -> Iterator[Job]:
        """The requests in order, with their arrival times in an open loop.

        Raises:
            LoadTestError: as `load` and `arrival_times`.
        """
        source, process = self.load(), self.process()
        if isinstance(source, Trace):
            count: int | None = len(source.jobs)
            rate, burst = self.rate or 1.0, 1
        else:
            count = None if self.requests < 0 else self.requests or source.requests
            rate, burst = self.rate or source.rate, source.burst
        numbers: Iterator[int] = itertools.count() if count is None else iter(range(count))
        jobs = (source.job(number, self.seed) for number in numbers)
        if process == "trace":
            return jobs
        if process == "closed":
            return (_due(job, None) for job in jobs)
        times = arrival_times(process, rate, self.seed, self.cv, burst)
        return (_due(job, at) for job, at in zip(jobs, times))

    def prompts(self, seed_shift: int = 0) -> IdPrompts | TextPrompts:
        """The maker of this load's prompts."""
        tokenizer = load_tokenizer(Path(self.tokenizer)) if self.tokenizer else None
        if self.prompt == "text":
            if tokenizer is None:
                raise LoadTestError("--prompt text needs --tokenizer, the checkpoint folder that the server serves")
            return TextPrompts(tokenizer, self.seed + seed_shift)
        if self.prompt != "ids":
            raise LoadTestError(f"prompt {self.prompt!r}: allowed are ids and text")
        return IdPrompts(tokenizer.get_vocab_size() if tokenizer else self.vocab_size, self.seed + seed_shift)

    def check(self, client: Client, model: str) -> None:
        """Refuse what cannot work before any load starts; one request warms the connection up.

        Raises:
            LoadTestError: no server, no such model, or a longest request that the model refuses.
        """
        source = self.load()
        client.check()
        longest = Job(0, "probe", source.longest - 1, 1)
        exchange = client.send(self.prompts(_PROBE_SEED_SHIFT).make(longest), 1)
        if exchange.error is not None:
            raise LoadTestError(
                f"{source.name} has requests of {source.longest} tokens, which {model} refuses "
                f"({exchange.error}); scale it to the model's context with --context N, or choose another scenario"
            )

    def arguments(self) -> list[str]:
        """The options as command-line arguments, without those at their defaults."""
        given: list[str] = []
        for name, default in vars(LoadOptions()).items():
            if (value := getattr(self, name)) != default:
                given += [f"--{name.replace('_', '-')}", str(value)]
        return given

    @classmethod
    def from_arguments(cls, parsed: Any) -> LoadOptions:
        """From the namespace of a parser that `add_arguments` has seen."""
        return cls(**{name: getattr(parsed, name) for name in vars(cls())})


def _due(job: Job, at: float | None) -> Job:
    return Job(job.index, job.kind, job.prompt_tokens, job.output_tokens, at, job.hash_ids)


_HELP = {
    "scenario": "Name of the load mix.",
    "trace": "CSV or JSONL file to replay instead of a scenario.",
    "speed": "Replay a trace this many times as fast.",
    "seed": "The same seed repeats lengths, prompts and arrivals.",
    "requests": "How many requests; 0 is the scenario's number, -1 no end.",
    "arrivals": "closed, poisson, gamma, constant or trace; empty is the scenario's own.",
    "rate": "Requests per second of an open loop; 0 is the scenario's.",
    "cv": "Coefficient of variation of the gaps of gamma arrivals.",
    "context": "Scale the scenario to a model of this many tokens.",
    "prompt": "ids sends token ids, text sends text of exactly as many tokens.",
    "tokenizer": "Checkpoint folder whose tokenizer counts.",
    "vocab_size": "Random ids lie below this without a tokenizer.",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options on Locust's parser."""
    for name, default in vars(LoadOptions()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, type=type(default), default=default, help=_HELP[name])
