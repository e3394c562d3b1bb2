"""What a load consists of, as options that Locust and the runner share."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight_tools.workload.load import Load
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import Job
from loadtest.clients import LoadClient
from loadtest.errors import LoadTestError
from loadtest.prompts import TextPrompts, load_tokenizer

__all__ = ["LoadOptions", "add_arguments"]

_PROBE_SEED_SHIFT = 1_000_003  # the probe's prompt must not be the prefix of a measured one


@dataclass(frozen=True)
class LoadOptions(Load):
    """A load, complete but for where it goes.

    Attributes:
        prompt: "ids" or "text".
        tokenizer: checkpoint folder for "text"; its vocabulary bounds "ids", too.
        vocab_size: bound of random token ids when there is no tokenizer.
    """

    prompt: str = "ids"
    tokenizer: str = ""
    vocab_size: int = 1000

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

    def check(self, client: LoadClient, model: str) -> None:
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
