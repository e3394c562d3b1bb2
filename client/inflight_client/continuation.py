"""The output of a request that has arrived, and the request for the rest.  No I/O."""

from __future__ import annotations

import dataclasses
import random

from inflight_client.request import GenerationRequest
from inflight_client.results import StreamChunk
from inflight_client.wire import Columns, token_logprob_sums

__all__ = ["Continuation"]

_seeds = random.SystemRandom()


class Continuation:
    """Follows the responses of one request so that another server can continue it.

    The request must stream, and have a seed, the token ids of its output, and the content of its adapter: `request`
    asks for these even if the caller does not, and `take` hides what the caller did not ask for.

    Args:
        request: the caller's request.
        wanted: make the request continuable, if possible.

    Attributes:
        request: the request to send first.
        possible: whether an interrupted stream can be continued.
        received: whether any response has arrived.
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
        self._adapter_digest: str | None = None

    @property
    def complete(self) -> bool:
        """Every sequence has reported its finish reason: no more output will arrive."""
        return all(self._ended)

    def take_whole(self) -> None:
        """The one response of a request without a stream arrived."""
        self.received = True
        self._ended = [True]

    def take(self, columns: Columns, chunk: StreamChunk) -> None:
        """A response arrived."""
        self.received = True
        if self.possible and "token_ids" not in columns:
            self.possible = False  # a server that does not implement the whole wire contract
        if self.possible:
            self._keep(columns, chunk)
            if "lora_digest" in columns:
                self._adapter_digest = columns["lora_digest"][0]
        for delta in chunk.choices:
            if self._ended[delta.index]:
                delta.finish_reason = None  # reported before; servers repeat it while other sequences continue
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
        """The request for the output that has not arrived."""
        if not (self._any_tokens and self.possible):
            return self.request
        sampling = {key: value for key, value in self.request.sampling.items() if key != "prompt_logprobs"}
        open_ids = [None if ended else list(ids or ()) for ended, ids in zip(self._ended, self._token_ids)]
        return dataclasses.replace(
            self.request,
            sampling=sampling,
            # At least one id is needed; ended sequences can be sent with their tokens, too.
            resume_token_ids=open_ids if any(open_ids) else [ids and list(ids) for ids in self._token_ids],
            resume_cumulative_logprob=list(self._sums) if self.request.return_cumulative_logprob else None,
            adapter_digest=self._adapter_digest,
        )


def _continuable(request: GenerationRequest) -> GenerationRequest:
    sampling = request.sampling
    has_seed = any(sampling.get(name) not in (None, -1, "-1") for name in ("seed", "random_seed"))
    if not has_seed and request.resume_token_ids is None:  # a resumed request keeps the seed of its beginning
        sampling = {**sampling, "seed": _seeds.getrandbits(63)}
        sampling.pop("random_seed", None)
    return request.changed(
        sampling=sampling,
        return_token_ids=True,
        # The server's sums are rounded; the sums of single log probabilities are not.
        return_log_probs=request.return_cumulative_logprob,
        return_adapter_digest=request.adapter is not None,
    )
