"""Load mixes as named data.  A scenario and a seed determine request number k."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from inflight_tools.workload.errors import WorkloadError

__all__ = [
    "SCENARIOS",
    "Cycle",
    "Job",
    "LogNormal",
    "PromptClass",
    "Scenario",
    "SharedPrefixes",
    "Uniform",
    "find_scenario",
]

ArrivalName = Literal["closed", "poisson", "gamma", "constant", "trace"]


@dataclass(frozen=True)
class Job:
    """One request of a load.

    Attributes:
        index: its number, from 0.
        kind: name of its prompt class, under which its latencies are reported.
        prompt_tokens, output_tokens: exact numbers of tokens.
        due: seconds after the start of the load at which it is sent; None if it waits for a free user.
        hash_ids: ids of the prompt's blocks of 512 tokens; equal ids mean equal tokens (Mooncake).
        adapter: name of the LoRA adapter that answers; "" is the checkpoint alone.
    """

    index: int
    kind: str
    prompt_tokens: int
    output_tokens: int
    due: float | None = None
    hash_ids: tuple[int, ...] = ()
    adapter: str = ""


@dataclass(frozen=True)
class Uniform:
    """Integers from `low` to `high`, inclusive."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, index: int) -> int:
        return int(rng.integers(self.low, self.high + 1))

    def scaled(self, factor: float) -> Uniform:
        return Uniform(max(1, int(self.low * factor)), max(1, int(self.high * factor)))


@dataclass(frozen=True)
class LogNormal:
    """`exp(N(mu, sigma))`, rounded and clipped to `low`..`high`."""

    mu: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, index: int) -> int:
        return int(np.clip(round(rng.lognormal(self.mu, self.sigma)), self.low, self.high))

    def scaled(self, factor: float) -> LogNormal:
        low, high = max(1, int(self.low * factor)), max(1, int(self.high * factor))
        return LogNormal(self.mu + float(np.log(factor)), self.sigma, low, high)


@dataclass(frozen=True)
class Cycle:
    """`values` in rotation: request k gets value k modulo their number."""

    values: tuple[int, ...]

    @property
    def high(self) -> int:
        return max(self.values)

    def draw(self, rng: np.random.Generator, index: int) -> int:
        return self.values[index % len(self.values)]

    def scaled(self, factor: float) -> Cycle:
        return Cycle(tuple(max(1, int(value * factor)) for value in self.values))


@dataclass(frozen=True)
class PromptClass:
    """A share of the requests and the lengths of their prompts."""

    name: str
    share: float
    prompt: Uniform


@dataclass(frozen=True)
class SharedPrefixes:
    """Every prompt begins with one of `count` texts, such as system prompts or documents.

    Attributes:
        count: number of texts; the k-th most popular is asked for in proportion to `k ** -exponent`.
        blocks: length of each, in blocks of 512 tokens.
    """

    count: int
    blocks: int
    exponent: float = 1.0

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """The ids of the blocks of one of the texts."""
        if not self.blocks:
            return ()
        first = int(np.searchsorted(_zipf(self.count, self.exponent), rng.random(), side="right")) * self.blocks
        return tuple(range(first, first + self.blocks))


@cache
def _zipf(count: int, exponent: float) -> np.ndarray:
    """The cumulative shares of ranks 1 to `count`, without the last."""
    shares = np.arange(1, count + 1, dtype=float) ** -exponent
    return np.cumsum(shares / shares.sum())[:-1]


@dataclass(frozen=True)
class Scenario:
    """A load mix.

    Attributes:
        name, about: human-readable.
        classes: prompt classes; their shares add up to 1.
        output: distribution of the number of output tokens.
        users: of a closed loop.
        requests: number of requests in a measured run.
        arrivals: "closed", or the default arrival process.
        rate: requests per second of an open loop.
        burst: requests that arrive together, `burst / rate` seconds apart; 1 for no bursts.
        prefixes: what prompts have in common; their lengths include it.
        ramp: seconds of the rise, the peak and the fall of the number of users; empty if it is constant.
    """

    name: str
    about: str
    classes: tuple[PromptClass, ...]
    output: Uniform | LogNormal | Cycle
    users: int = 40
    requests: int = 96
    arrivals: ArrivalName = "closed"
    rate: float = 2.0
    burst: int = 1
    ramp: tuple[float, float, float] | tuple[()] = ()
    prefixes: SharedPrefixes | None = None

    @property
    def longest_prompt(self) -> int:
        return max(prompt_class.prompt.high for prompt_class in self.classes)

    @property
    def longest(self) -> int:
        """Maximum length of a request in tokens, prompt and output together."""
        return self.longest_prompt + self.output.high

    def job(self, index: int, seed: int) -> Job:
        """Request number `index`; depends only on the scenario, `index` and `seed`."""
        rng = np.random.default_rng([seed, index])
        chosen = rng.choice(len(self.classes), p=[prompt_class.share for prompt_class in self.classes])
        prompt_class = self.classes[chosen]
        prompt_tokens, output_tokens = prompt_class.prompt.draw(rng, index), self.output.draw(rng, index)
        hash_ids = self.prefixes.draw(rng) if self.prefixes else ()
        return Job(index, prompt_class.name, prompt_tokens, output_tokens, hash_ids=hash_ids)

    def scaled(self, context: int) -> Scenario:
        """The same mix for a model of `context` tokens; unchanged if it fits already.

        Outputs shrink only if they would take more than half of the context; prompts shrink by a common
        factor, so that the longest request just fits.  Shared prefixes shrink by whole blocks.

        Raises:
            WorkloadError: a context below 16 tokens.
        """
        if context < 16:
            raise WorkloadError(f"cannot scale {self.name} to {context} tokens of context; give at least 16")
        shrink = min(1.0, context / 2 / self.output.high)
        output = self.output.scaled(shrink) if shrink < 1 else self.output
        factor = min(1.0, (context - output.high) / self.longest_prompt)
        classes = tuple(dataclasses.replace(kind, prompt=kind.prompt.scaled(factor)) for kind in self.classes)
        prefixes = self.prefixes
        if prefixes and factor < 1:
            prefixes = dataclasses.replace(prefixes, blocks=int(prefixes.blocks * factor))
        return dataclasses.replace(self, classes=classes, output=output, prefixes=prefixes)


# Prompt lengths of the benchmarks in bench/: mostly short, some long.
_MIXED = (
    PromptClass("short", 0.7, Uniform(16, 128)),
    PromptClass("medium", 0.2, Uniform(256, 768)),
    PromptClass("long", 0.1, Uniform(1024, 2048)),
)
_LOGNORMAL = LogNormal(4.0, 0.8, 10, 370)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "lognormal",
            "mixed prompts, output lengths lognormal(4.0, 0.8) in 10..370",
            _MIXED,
            _LOGNORMAL,
        ),
        Scenario(
            "chat-rag",
            "chat, retrieval and long documents: 70% of prompts under 512 tokens, 20% of 2-8K, 10% of 8-15K",
            (
                PromptClass("chat", 0.7, Uniform(32, 511)),
                PromptClass("rag", 0.2, Uniform(2048, 8192)),
                PromptClass("document", 0.1, Uniform(8193, 15360)),
            ),
            LogNormal(4.6, 0.7, 16, 512),
            users=16,
            requests=48,
        ),
        Scenario(
            "bursty",
            "every 12 s ten requests at once, five of 50 output tokens and five of 500",
            (PromptClass("burst", 1.0, Uniform(16, 128)),),
            Cycle((50, 500) * 5),
            requests=30,
            arrivals="constant",
            rate=10 / 12,
            burst=10,
        ),
        Scenario(
            "month-end",
            "a ramp up to 40 users, a peak, a ramp down; requests as in lognormal",
            _MIXED,
            _LOGNORMAL,
            ramp=(10.0, 25.0, 10.0),
        ),
        Scenario(
            "prefix-heavy",
            "chats of 64 assistants, some far more popular: 1024 tokens of system prompt, 32 to 512 of their own",
            (PromptClass("chat", 1.0, Uniform(1056, 1536)),),
            _LOGNORMAL,
            prefixes=SharedPrefixes(64, 2),
        ),
        Scenario(
            "uniform",
            "for contrast: identical requests of 128 prompt tokens and 64 output tokens",
            (PromptClass("uniform", 1.0, Uniform(128, 128)),),
            Uniform(64, 64),
        ),
    )
}


def find_scenario(name: str, known: Sequence[str] = tuple(SCENARIOS)) -> Scenario:
    """The named scenario.

    Raises:
        WorkloadError: an unknown name.
    """
    if name not in SCENARIOS:
        raise WorkloadError(f"unknown scenario {name!r}; choose one of {', '.join(known)}")
    return SCENARIOS[name]
