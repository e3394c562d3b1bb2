"""Log probabilities of tokens as flat arrays, from the sampler to the frontend: no Python object per entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

import msgspec
import numpy as np

__all__ = ["Logprobs", "TokenLogprobs", "prompt_token_weight"]

# One generated or prompt token: (token_id, logprob, rank) triples, the token itself first, then
# the top ones in order of falling log probability.  Rank 1 is the most likely token.
TokenLogprobs = list[tuple[int, float, int]]

_ID, _VALUE = np.dtype(np.int32), np.dtype(np.float32)
_SIZE = 4  # bytes of an element of each array

# Ranking the vocabulary for so many log probabilities of a prompt token, and writing them as text, costs about as
# much as computing a token: measured with a model of 4 M parameters, which is the worst case.
_LOGPROBS_PER_TOKEN = 32
_MOST_LOGPROBS = 1024  # most that count: a whole vocabulary is not ranked, and every prompt must progress


def prompt_token_weight(num_logprobs: int) -> float:
    """The tokens of a step that a prompt token counts as if so many of its log probabilities are asked for; -1: all."""
    return 1 + (_MOST_LOGPROBS if num_logprobs < 0 else min(num_logprobs, _MOST_LOGPROBS)) / _LOGPROBS_PER_TOKEN


class Logprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`TokenLogprobs` of consecutive tokens: as a sequence of them, and as arrays in native byte order.

    Attributes:
        counts: triples of each token; 0 for the first token of a prompt, which nothing predicts.
        token_ids, ranks: int32, of all tokens, concatenated.
        values: float32, likewise; not finite where the model's logits are not.
    """

    counts: list[int] = []
    token_ids: bytes = b""
    values: bytes = b""
    ranks: bytes = b""

    @classmethod
    def of(cls, entries: Iterable[TokenLogprobs]) -> Logprobs:
        """From triples."""
        entries = list(entries)
        ids, values, ranks = zip(*chain.from_iterable(entries)) if any(entries) else ((), (), ())
        return cls(
            [len(entry) for entry in entries],
            np.array(ids, dtype=_ID).tobytes(),
            np.array(values, dtype=_VALUE).tobytes(),
            np.array(ranks, dtype=_ID).tobytes(),
        )

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """The tokens of all parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            list(chain.from_iterable(part.counts for part in parts)),
            b"".join(part.token_ids for part in parts),
            b"".join(part.values for part in parts),
            b"".join(part.ranks for part in parts),
        )

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.counts)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        triples = zip(*(array.tolist() for array in self.arrays()))
        return ([next(triples) for _ in range(count)] for count in self.counts)

    def __getitem__(self, tokens: slice) -> Logprobs:
        """The log probabilities of consecutive tokens."""
        first, end, _ = tokens.indices(len(self))
        if first == 0 and end == len(self):
            return self
        start = _SIZE * sum(self.counts[:first])
        stop = start + _SIZE * sum(self.counts[first:end])
        return Logprobs(
            self.counts[first:end], self.token_ids[start:stop], self.values[start:stop], self.ranks[start:stop]
        )

    def split(self, sizes: Iterable[int]) -> Iterator[Logprobs]:
        """Consecutive parts with these numbers of tokens."""
        ends = [0, *accumulate(self.counts)]
        first = 0
        for size in sizes:
            start, stop = _SIZE * ends[first], _SIZE * ends[first + size]
            yield Logprobs(
                self.counts[first : first + size],
                self.token_ids[start:stop],
                self.values[start:stop],
                self.ranks[start:stop],
            )
            first += size

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, log probabilities and ranks of all triples."""
        return (
            np.frombuffer(self.token_ids, dtype=_ID),
            np.frombuffer(self.values, dtype=_VALUE),
            np.frombuffer(self.ranks, dtype=_ID),
        )

    def first_values(self) -> list[float]:
        """Log probability of each token itself; every token has one."""
        counts = np.array(self.counts, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        return np.frombuffer(self.values, dtype=_VALUE)[starts].tolist()
