"""What has arrived of a request, and the request for the rest of it.  No I/O."""

from __future__ import annotations

import dataclasses
import random

from inflight_client.request import GenerationRequest
from inflight_client.results import StreamChunk
from inflight_client.wire import Columns, token_logprob_sums

__all__ = ["Continuation"]

_seeds = random.SystemRandom()


class Continuation:
    """Follows the responses of one request so that another server can go on behind them.

    For that the request must stream, and have a seed and the token ids of its output: `request` has them, whether
    its caller asked for them or not, and `take` hides what the caller did not ask for.

    Args:
        request: as its caller made it.
        wanted: make the request continuable, if it can be.

    Attributes:
        request: what to send first.
        possible: an interrupted stream can be continued.
        received: any response arrived.
    """

    def __init__(self, request: GenerationRequest, wanted: bool) -> None:
        self.possible = wanted and request.stream and request.sampling.get("output_kind") in (None, 1, "1")
        self.received = False
        self.request = _continuable(request) if self.possible else request
        self._hides_ids = self.possible and not request.return_token_ids
        given = request.resume_token_ids or [[] for _ in range(request.n)]
        self._token_ids = [None if ids is None else list(ids) for ids in given]
        self._sums = list(request.resume_cumulative_logprob or [0.0] * len(given))
        self._ended = [ids is None for ids in given]
        self._any_tokens = False

    @property
    def complete(self) -> bool:
        """Every sequence has told how it ended: nothing more will come."""
        return all(self._ended)

    def take(self, columns: Columns, chunk: StreamChunk) -> None:
        """A response arrived."""
        self.received = True
        if self.possible and "token_ids" not in columns:
            self.possible = False  # a server that does not speak the whole wire contract
        if self.possible:
            self._keep(columns, chunk)
        for delta in chunk.choices:
            if self._ended[delta.index]:
                delta.finish_reason = None  # it was told; servers repeat it while other sequences go on
            elif delta.finish_reason is not None:
                self._ended[delta.index] = True
            if self._hides_ids:
                delta.token_ids = []

    def _keep(self, columns: Columns, chunk: StreamChunk) -> None:
        for delta in chunk.choices:
            ids = self._token_ids[delta.index]
            if ids is not None and delta.token_ids:
                ids += delta.token_ids
                self._any_tokens = True
        if "output_log_probs" in columns:
            sums = token_logprob_sums(columns, [delta.num_tokens for delta in chunk.choices])
            for delta, logprob in zip(chunk.choices, sums):
                self._sums[delta.index] += logprob

    def rest(self) -> GenerationRequest:
        """The request for what has not arrived."""
        if not self._any_tokens:
            return self.request
        sampling = {key: value for key, value in self.request.sampling.items() if key != "prompt_logprobs"}
        open_ids = [None if ended else list(ids or ()) for ended, ids in zip(self._ended, self._token_ids)]
        return dataclasses.replace(
            self.request,
            sampling=sampling,
            # At least one id: what has ended may be sent with its tokens, too.
            resume_token_ids=open_ids if any(open_ids) else [ids and list(ids) for ids in self._token_ids],
            resume_cumulative_logprob=list(self._sums) if self.request.return_cumulative_logprob else None,
        )


def _continuable(request: GenerationRequest) -> GenerationRequest:
    sampling = request.sampling
    has_seed = any(sampling.get(name) not in (None, -1, "-1") for name in ("seed", "random_seed"))
    if not has_seed and request.resume_token_ids is None:  # output that was begun elsewhere has the seed of there
        sampling = {**sampling, "seed": _seeds.getrandbits(63)}
        sampling.pop("random_seed", None)
    return dataclasses.replace(
        request,
        sampling=sampling,
        return_token_ids=True,
        # The sums that the server sends are rounded; these are not.
        return_log_probs=request.return_cumulative_logprob,
    )
