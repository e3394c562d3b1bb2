"""Requests that continue an output that their client already has.  No torch, no Triton."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inflight.engine.sampling_params import SamplingParams
from inflight.engine.stop_rules import max_total_tokens, stop_ids
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.values import to_float, to_int

__all__ = ["RESUME_INPUTS", "Resumed", "SequenceEnd", "read_resumed"]

RESUME_INPUTS = ("resume_token_ids", "resume_token_counts", "resume_cumulative_logprob")
_IDS, _COUNTS, _LOGPROBS = RESUME_INPUTS

_ENDED = -1  # in `resume_token_counts`; null in a list of lists
_GREEDY_BELOW = 1e-5  # as in `sampling/table.py`, which imports torch


class SequenceEnd(NamedTuple):
    """How a sequence ended with its last token, as in a `SequenceDelta`."""

    finish_reason: str
    stop_token: int | None = None


@dataclass(slots=True)
class Resumed:
    """Output to continue, one entry for each of the n sequences; all lists are empty if there is none.

    Attributes:
        token_ids: as `AddRequest.output_token_ids`.
        ends: how each complete sequence ended; None for the others.
        cumulative_logprobs: sums of log probabilities.
    """

    token_ids: list[list[int] | None] = field(default_factory=list)
    ends: list[SequenceEnd | None] = field(default_factory=list)
    cumulative_logprobs: list[float] = field(default_factory=list)


def read_resumed(
    fields: Mapping[str, Any],
    params: SamplingParams,
    num_prompt_tokens: int,
    *,
    seed_given: bool,
    eos_token_ids: Sequence[int],
    max_model_len: int,
    vocab_size: int,
) -> Resumed:
    """Read the output so far from a request.

    Args:
        fields: inputs and request parameters by name; a parameter is a JSON list, or a string that is one.
        params: of the request, checked.
        seed_given: the request names a seed.
        eos_token_ids, max_model_len, vocab_size: of the loaded checkpoint.

    Raises:
        RequestError: INVALID_ARG; lists of the wrong type or length, ids that are not in the vocabulary, output after
            its own end, a random request without a seed, or nothing left to generate.
    """
    given = {name: _json(fields[name]) for name in RESUME_INPUTS if fields.get(name) is not None}
    if _IDS not in given:
        if given:
            raise RequestError("INVALID_ARG", f"{' and '.join(given)} without {_IDS}: give both, or neither")
        return Resumed()
    outputs = _sequences(given[_IDS], given.get(_COUNTS), params.n)
    sums = _numbers(_LOGPROBS, given[_LOGPROBS], to_float, "numbers") if _LOGPROBS in given else []
    if sums and len(sums) != params.n:
        raise RequestError("INVALID_ARG", f"{_LOGPROBS} has {len(sums)} entries: give one for each of n={params.n}")
    if all(output == [] for output in outputs):
        return Resumed()  # it was cut before the first token: an ordinary request
    if all(output is None for output in outputs):
        raise RequestError("INVALID_ARG", f"{_IDS}: every sequence has ended, and nothing is left to generate")
    if not seed_given and params.temperature >= _GREEDY_BELOW:
        raise RequestError(
            "INVALID_ARG",
            f"{_IDS} needs the seed of the request that began the output: give a seed with every request that may "
            "have to be resumed, or temperature 0",
        )
    limit = max_total_tokens(params, num_prompt_tokens, max_model_len) - num_prompt_tokens
    ending = stop_ids(params, eos_token_ids)
    ends = [_end(index, output, limit, ending, vocab_size) for index, output in enumerate(outputs)]
    return Resumed(outputs, ends, sums)


def _json(value: Any) -> Any:
    """Decode a request parameter: a string or a number where an input is a list."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # refused later, with its own text
    return value


def _sequences(ids: Any, counts: Any, n: int) -> list[list[int] | None]:
    """The output of each sequence; None for one that has ended."""
    entries = ids if isinstance(ids, list) else [ids]
    if any(entry is None or isinstance(entry, list) for entry in entries):
        if counts is not None:
            raise RequestError("INVALID_ARG", f"{_IDS} is a list of lists, and {_COUNTS} is given too: omit one")
        if len(entries) != n:
            raise RequestError("INVALID_ARG", f"{_IDS} has {len(entries)} lists: give one for each of n={n}")
        return [None if entry is None else _numbers(_IDS, entry, to_int, "token ids") for entry in entries]
    flat = _numbers(_IDS, entries, to_int, "token ids")
    if counts is None:
        if n > 1 and flat:
            raise RequestError(
                "INVALID_ARG",
                f"{_IDS} has {len(flat)} token ids for n={n} sequences: give {_COUNTS}, or a JSON list of lists",
            )
        return [flat, *([] for _ in range(n - 1))]
    sizes = _numbers(_COUNTS, counts, to_int, "integers")
    if len(sizes) != n or min(sizes) < _ENDED or sum(max(size, 0) for size in sizes) != len(flat):
        raise RequestError(
            "INVALID_ARG",
            f"{_COUNTS}={shown(sizes)} for {len(flat)} token ids: must be one count for each of n={n} sequences "
            f"({_ENDED} for one that has ended), and add up to the number of ids",
        )
    outputs: list[list[int] | None] = []
    start = 0
    for size in sizes:
        outputs.append(None if size == _ENDED else flat[start : start + size])
        start += max(size, 0)
    return outputs


def _numbers(name: str, values: Any, convert: Callable[[Any], Any], what: str) -> list[Any]:
    try:
        return [convert(value) for value in (values if isinstance(values, list) else [values])]
    except (ValueError, TypeError, OverflowError):
        raise RequestError("INVALID_ARG", f"{name}={shown(values)}: must be a list of {what}") from None


def _end(
    index: int, output: list[int] | None, limit: int, ending: frozenset[int], vocab_size: int
) -> SequenceEnd | None:
    """How the sequence ended with its last token; None if it continues."""
    if not output:
        return None
    low, high = min(output), max(output)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError("INVALID_ARG", f"{_IDS}: token id {bad} is not in the vocabulary [0, {vocab_size - 1}]")
    if len(output) > limit:
        raise RequestError(
            "INVALID_ARG",
            f"{_IDS}: sequence {index} has {len(output)} tokens, more than the {limit} that max_tokens and "
            "max_model_len allow in all",
        )
    ended = next((place for place, token in enumerate(output) if token in ending), None)
    if ended is None:
        return SequenceEnd("length") if len(output) == limit else None
    if ended < len(output) - 1:
        raise RequestError(
            "INVALID_ARG",
            f"{_IDS}: sequence {index} ended with stop token {output[ended]}, and {len(output) - 1 - ended} more "
            "tokens follow: give its output up to that token",
        )
    return SequenceEnd("stop", output[-1])
