"""The options of a load, shared by Locust and the runner."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight_tools.workload.load import Load
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job
from loadtest.errors import LoadTestError
from loadtest.exchange import LoadClient
from loadtest.prompts import TextPrompts, WordPrompts, load_tokenizer

__all__ = ["LoadOptions", "add_arguments"]

_PROBE_SEED_SHIFT = 1_000_003  # the probe must not share a prefix with a measured prompt

_UNKNOWN = "is not supported, we currently support"  # a backend's error for an adapter that it does not have


@dataclass(frozen=True)
class LoadOptions(Load):
    """A load and how its prompts are made.

    Attributes:
        prompt: "ids", "text" of exact lengths, "words", about one token each, or "auto": ids where they can be sent.
        tokenizer: checkpoint folder for "text"; its vocabulary also bounds "ids".
        vocab_size: bound of the random token ids if there is no tokenizer.
        adapters: names of LoRA adapters between commas; requests take turns with them.  An empty one is the checkpoint
            alone.  "": no request has one.
    """

    prompt: str = "auto"
    tokenizer: str = ""
    vocab_size: int = 1000
    adapters: str = ""

    def adapter_names(self) -> list[str]:
        """The adapters, "" for the checkpoint alone; [] if no request has one.

        Raises:
            LoadTestError: a name is given twice.
        """
        if not self.adapters:
            return []
        names = [name.strip() for name in self.adapters.split(",")]
        if len(set(names)) < len(names):
            raise LoadTestError(f"--adapters {self.adapters!r}: give each name once; at most one is empty")
        return names

    def jobs(self) -> Iterator[Job]:
        """As of `Load`, with adapters in turn; the class of a request then names its adapter, too."""
        names, jobs = self.adapter_names(), super().jobs()
        return (_adapted(job, names[job.index % len(names)]) for job in jobs) if names else jobs

    def prompts(self, seed_shift: int = 0) -> IdPrompts | TextPrompts | WordPrompts:
        """The prompt generator of this load."""
        if self.prompt == "words":
            return WordPrompts(self.seed + seed_shift)
        tokenizer = load_tokenizer(Path(self.tokenizer)) if self.tokenizer else None
        if self.prompt == "text":
            if tokenizer is None:
                raise LoadTestError("--prompt text requires --tokenizer, the folder of the served checkpoint")
            return TextPrompts(tokenizer, self.seed + seed_shift)
        if self.prompt not in ("ids", "auto"):
            raise LoadTestError(f"prompt {self.prompt!r}: must be auto, ids, text or words")
        return IdPrompts(tokenizer.get_vocab_size() if tokenizer else self.vocab_size, self.seed + seed_shift)

    def for_client(self, client: LoadClient) -> LoadOptions:
        """The same load with prompts that the server takes.

        Raises:
            LoadTestError: token ids are wanted, but it takes only text.
        """
        if client.takes_ids:
            return self
        if self.prompt == "ids":
            raise LoadTestError(
                "--prompt ids: the server takes only text; use --prompt words, or text with --tokenizer"
            )
        return self if self.prompt == "text" else dataclasses.replace(self, prompt="words")

    def checked(self, client: LoadClient, model: str) -> LoadOptions:
        """Check the server before any load starts; one request warms up the connection.

        Returns:
            The load with prompts that the server takes.

        Raises:
            LoadTestError: no server, no such model, or the model rejects the longest request.
        """
        source = self.load()
        client.check()
        found = self.for_client(client)
        longest = Job(0, "probe", source.longest - 1, 1)
        exchange = client.send(found.prompts(_PROBE_SEED_SHIFT).make(longest), 1)
        if exchange.error is not None:
            raise LoadTestError(
                f"{source.name} has requests of {source.longest} tokens, which {model} rejects "
                f"({exchange.error}); scale it to the model's context with --context N, or choose another scenario"
            )
        short = found.prompts(_PROBE_SEED_SHIFT).make(Job(0, "probe", 4, 1))
        for name in filter(None, self.adapter_names()):
            client.check_adapter(name)
            exchange = client.send(short, 1, name)
            if exchange.error is not None:
                unknown = exchange.failure == "HTTP 404" or _UNKNOWN in exchange.error
                remedy = "; load it there" if unknown else ""
                raise LoadTestError(f"--adapters: {model} refuses adapter {name!r} ({exchange.error}){remedy}")
        return found

    def arguments(self) -> list[str]:
        """The options that differ from their defaults, as command-line arguments."""
        given: list[str] = []
        for name, default in vars(LoadOptions()).items():
            if (value := getattr(self, name)) != default:
                given += [f"--{name.replace('_', '-')}", str(value)]
        return given

    @classmethod
    def from_arguments(cls, parsed: Any) -> LoadOptions:
        """From the namespace of a parser that `add_arguments` extended."""
        return cls(**{name: getattr(parsed, name) for name in vars(cls())})


def _adapted(job: Job, name: str) -> Job:
    return dataclasses.replace(job, kind=f"{name or 'no adapter'}, {job.kind}", adapter=name)


_HELP = {
    "scenario": "Name of the load mix.",
    "trace": "CSV or JSONL file to replay instead of a scenario.",
    "speed": "Replay a trace this many times as fast.",
    "seed": "The same seed repeats lengths, prompts and arrivals.",
    "requests": "Number of requests; 0 uses the scenario's, -1 is endless.",
    "arrivals": "closed, poisson, gamma, constant or trace; empty uses the scenario's.",
    "rate": "Requests per second of an open loop; 0 uses the scenario's.",
    "cv": "Coefficient of variation of the gaps of gamma arrivals.",
    "context": "Scale the scenario to a model of this many tokens.",
    "prompt": "ids sends token ids, text exactly as many tokens of text, words about as many; auto: ids if possible.",
    "tokenizer": "Checkpoint folder with the tokenizer.",
    "vocab_size": "Without a tokenizer, random ids lie below this.",
    "adapters": "LoRA adapters between commas, which requests take in turn; an empty one: none.",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options on Locust's parser."""
    for name, default in vars(LoadOptions()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, type=type(default), default=default, help=_HELP[name])
