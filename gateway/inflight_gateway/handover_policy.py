"""Which prompts are computed by a Triton for prompts (`--prefill-triton`).  Pure, no I/O."""

from __future__ import annotations

import statistics
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

from inflight_client.request import GenerationRequest
from inflight_gateway.affinity import key_of
from inflight_gateway.routing import CHARACTERS, leading_text

__all__ = [
    "LEAST_TOKENS",
    "Costs",
    "Prompt",
    "Recent",
    "Rest",
    "SentPrefixes",
    "can_be_handed_over",
    "is_wanted",
    "least_tokens",
    "pays",
]

LEAST_TOKENS = 256  # "auto" hands over no fewer: tiers keep KV in pieces of about this size
_PIECE = 256  # tokens: prefixes are compared in steps of so many
_REMEMBERED = 2**16  # pieces, of 4 million tokens; about 10 MB
_REMEMBERED_SECONDS, _SAMPLES = 60.0, 16
_LEAST_PATIENCE, _UNMEASURED_PATIENCE, _MOST_PATIENCE = 1.0, 10.0, 30.0  # seconds
_PATIENCE = 3.0  # times the usual seconds
_FIRST_REST, _LONGEST_REST = 1.0, 30.0  # seconds, as of `inflight_client.endpoints`


class Recent:
    """The median of what was measured lately: of up to 16 values that are at most a minute old."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def add(self, now: float, value: float) -> None:
        self._values.append((now, value))

    def median(self, now: float) -> float | None:
        """None if there is no value."""
        values = [value for time, value in self._values if now - time <= _REMEMBERED_SECONDS]
        return statistics.median(values) if values else None


@dataclass
class Costs:
    """The costs of a model's prompts, as this process saw them lately.

    Attributes:
        alone: seconds a token, for prompts that a Triton of `--triton` computed; queueing included.
        prefill: the same at the Tritons for prompts.
        transfer: seconds from the request for the rest of an answer until it began.
    """

    alone: Recent = field(default_factory=Recent)
    prefill: Recent = field(default_factory=Recent)
    transfer: Recent = field(default_factory=Recent)

    def patience(self, now: float, tokens: int) -> float:
        """Seconds in which a Triton should have computed so many tokens, those before them in its queue included.

        Cached tokens count, too: they are loaded, or computed again.
        """
        each = self.prefill.median(now) or self.alone.median(now)
        if each is None:
            return _UNMEASURED_PATIENCE
        return min(_MOST_PATIENCE, max(_LEAST_PATIENCE, _PATIENCE * each * tokens))

    def was_late(self, now: float, seconds: float, tokens: int) -> None:
        """A Triton for prompts had not computed so many tokens by then: where all are slow, the patience grows."""
        self.prefill.add(now, max(seconds / max(tokens, 1), self.prefill.median(now) or 0.0))


def pays(costs: Costs, now: float, tokens: int, queued: int) -> bool:
    """The rule of "auto" for a prompt.

    Another Triton pays if computing the prompt alone takes longer than to get its KV, and longer than to wait for the
    prompts before it.  A cost that was not measured lately counts as zero, so the handover is tried, and measured.

    Args:
        tokens: of the prompt that are likely not cached.
        queued: tokens of prompts that the Triton for prompts computes now.
    """
    each = costs.alone.median(now) or costs.prefill.median(now)
    if tokens < LEAST_TOKENS or each is None:
        return tokens >= LEAST_TOKENS
    waits = queued * (costs.prefill.median(now) or each)
    return tokens * each > max(waits, costs.transfer.median(now) or 0.0)


def least_tokens(handover: str) -> int | None:
    """The number that `handover` is, so that prompts of more tokens are handed over; None: it is "auto"."""
    return int(handover) if handover.isdigit() else None


def is_wanted(above: int | None, costs: Costs, now: float, tokens: int, queued: int) -> bool:
    """Whether to hand over a prompt.

    Args:
        above: as from `least_tokens`.
        tokens, queued: as of `pays`.
    """
    return pays(costs, now, tokens, queued) if above is None else tokens > above


class Rest:
    """A Triton for prompts rests after a failure: for a second, then twice as long each time, at most 30 s.

    It rests as long as it asks for if that is longer.  After a rest it gets one prompt at a time until it answers.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._until = float("-inf")

    def is_over(self, now: float, queued: int) -> bool:
        """Whether it gets another prompt, beside so many tokens of prompts."""
        return now >= self._until and not (self._failures and queued)

    def answered(self) -> None:
        self._failures = 0

    def failed(self, now: float, retry_after: float | None = None) -> float | None:
        """The seconds of its rest; None: it rests already, so this was one of several requests that failed together."""
        if now < self._until:
            return None
        seconds = max(retry_after or 0.0, min(_LONGEST_REST, _FIRST_REST * 2 ** min(self._failures, 16)))
        self._failures += 1
        self._until = now + seconds
        return seconds


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, text estimated at four characters each; `cached` of them are likely cached."""

    tokens: int
    cached: int


class SentPrefixes:
    """The beginnings of prompts that this process has sent: their KV is likely in a cache or tier.

    Like the prefix cache it distinguishes models, adapters, tenants and salts.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[bytes, None] = OrderedDict()

    def sent(self, request: GenerationRequest) -> Prompt:
        """A prompt is about to be sent: what was known of it before."""
        data, size, tokens = _content(request)
        pieces = list(_chain(request, data, size))
        known = sum(1 for _ in takewhile(self._pieces.__contains__, pieces))
        for piece in pieces:
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > _REMEMBERED:
            self._pieces.popitem(last=False)
        return Prompt(tokens, known * _PIECE)


def _content(request: GenerationRequest) -> tuple[bytes, int, int]:
    """A prompt as bytes, bytes of a piece, and tokens of the prompt."""
    ids = request.input_ids
    if ids is not None:
        return array("q", ids).tobytes(), _PIECE * 8, len(ids)
    text = leading_text(request, 2**62)
    return text.encode("utf-8", "surrogatepass"), _PIECE * CHARACTERS, len(text) // CHARACTERS


def _chain(request: GenerationRequest, data: bytes, size: int) -> Iterator[bytes]:
    """A hash for each whole piece, which covers what is before it, too."""
    kind = "text" if request.input_ids is None else "ids"
    group = [request.model, request.adapter or "", request.tenant or "", request.cache_salt or "", kind]
    digest = key_of(group).encode()
    for end in range(size, len(data) + 1, size):
        digest = blake2b(digest + data[end - size : end], digest_size=16).digest()
        yield digest


def can_be_handed_over(request: GenerationRequest) -> bool:
    """Whether another Triton can go on behind the first token, and whether there is anything left to do then."""
    sampling = request.sampling
    return (
        request.pooling is None
        and request.resume_token_ids is None
        and request.n == 1
        and sampling.get("prompt_logprobs") is None
        and sampling.get("max_tokens") not in (1, "1")
        and sampling.get("output_kind") in (None, 1, "1")
    )
