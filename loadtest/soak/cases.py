"""Requests whose answers are known: greedy or seeded, so that they are the same in any batch and after any event."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from inflight_client.results import GenerationResult

__all__ = ["BAD_REQUESTS", "Answer", "Case", "answer_of", "make_cases", "matches"]

_PROMPTS = (
    "Return a new list containing",
    "This module provides a class that",
    "Raise ValueError if the argument is not",
    "Create a socket and",
    "If the optional argument is true, then",
    "The following functions read and write files. Each of them takes a path and",
)
_WORDS = [
    "the",
    "a",
    "file",
    "of",
    "list",
    "returns",
    "is",
    "object",
    "to",
    "string",
    "if",
    "and",
    "value",
    "none",
    "key",
    "open",
    "index",
    "path",
]
_STOPS = ("\n", ". ", "the", " a", "e")

# Requests that the server must refuse, without an effect on any other.
BAD_REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"max_tokens": 0},
    {"n": 0},
    {"top_p": 2.0},
    {"min_tokens": 9, "max_tokens": 8},
    {"extra_parameters": {"no_such_parameter": 1}},
)

# Of each sequence: text, token ids, finish reason.
Answer = tuple[tuple[str, tuple[int, ...], "str | None"], ...]


@dataclass(frozen=True)
class Case:
    """A request: the prompt and the options of `Client.stream`."""

    prompt: str
    options: dict[str, Any]


def make_cases(count: int, seed: int) -> list[Case]:
    """Different lengths, sampling parameters, n, stop strings and log probabilities; the same for the same seed."""
    rng = random.Random(seed)
    return [_make_case(rng, number) for number in range(count)]


def _make_case(rng: random.Random, number: int) -> Case:
    prompt = rng.choice(_PROMPTS)
    if number % 6 == 0:  # long enough to be computed in chunks
        prompt = " ".join(rng.choices(_WORDS, k=rng.randint(150, 400)))
    options: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 24, 60, 120))}
    if rng.random() < 0.4:
        options["temperature"] = 0.0
    else:
        options |= {"temperature": rng.uniform(0.4, 1.2), "seed": rng.randrange(2**31)}
        options |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"n": 2}, {"n": 4}))
    if rng.random() < 0.3:
        options["stop"] = rng.sample(_STOPS, k=rng.randint(1, 3))
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.1, "presence_penalty": 0.3}
    if rng.random() < 0.2:
        options["logprobs"] = rng.randint(1, 5)
    if rng.random() < 0.2:
        options["one_response"] = True
    return Case(prompt, options)


def answer_of(result: GenerationResult) -> Answer:
    return tuple((choice.text, tuple(choice.token_ids), choice.finish_reason) for choice in result.choices)


def matches(got: Answer, known: Answer, whole: bool) -> bool:
    """Whether an answer is the known one; one that is not `whole` can end early in every sequence."""
    if whole:
        return got == known
    return len(got) == len(known) and all(
        right[0].startswith(text) and right[1][: len(tokens)] == tokens for (text, tokens, _), right in zip(got, known)
    )
