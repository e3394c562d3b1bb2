"""Prompts that some Tritons compute, and answers that others generate: `--prefill-triton`, `--handover`.

The Tritons of both kinds have a KV tier in common (docs/memory.md).  The engine that generates looks there for the KV
of the prompt, by its content, and computes what it does not find.  So the Triton for prompts owes nothing: whatever
happens to it, the answer is that of one Triton.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from inflight_client.request import GenerationRequest
from inflight_gateway.handover_policy import LEAST_TOKENS, Costs, SentPrefixes, can_be_handed_over, pays
from inflight_gateway.handover_stream import HandoverStream, Outcome
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import AnyStream, AnyUpstream, ServedModel, Upstream

__all__ = ["HandoverUpstream", "PrefillTriton", "with_handover"]

_log = logging.getLogger("inflight_gateway")

_FIRST_REST, _LONGEST_REST = 1.0, 30.0  # seconds, as of `inflight_client.endpoints`


class PrefillTriton:
    """A Triton for prompts.  It rests after a failure: for a second, then twice as long each time, at most 30 s.

    Args:
        address: `host:port`.
        upstream: calls it; no call is repeated.
        clock: seconds.

    Attributes:
        queued: tokens of prompts that it computes now, for this process.
    """

    def __init__(self, address: str, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.upstream = upstream
        self.queued = 0
        self._clock = clock
        self._failures = 0
        self._rests_until = float("-inf")

    @property
    def is_free(self) -> bool:
        return self._clock() >= self._rests_until

    def answered(self) -> None:
        self._failures = 0

    def failed(self, why: str, retry_after: float | None = None) -> None:
        if not self.is_free:  # one of several requests that failed together
            return
        rest = max(retry_after or 0.0, min(_LONGEST_REST, _FIRST_REST * 2 ** min(self._failures, 16)))
        self._failures += 1
        self._rests_until = self._clock() + rest
        _log.warning("the Triton for prompts at %s gets none for %g s: %s", self.address, rest, why)


def with_handover(
    options: GatewayOptions,
    upstream: AnyUpstream,
    report: Callable[[Outcome], None],
    gap: Callable[[float], None],
) -> AnyUpstream:
    """`upstream`, with the Tritons for prompts that the options name."""
    if not options.prefill_triton or options.handover == "off":
        return upstream

    def calls(address: str) -> Upstream:
        own = dataclasses.replace(options, triton=(address,), prefill_triton=(), handover="", models=())
        return Upstream(dataclasses.replace(own, routing="ordered", reconnect_timeout=0.0))

    prefills = [PrefillTriton(address, calls(address)) for address in options.prefill_triton]
    return HandoverUpstream(upstream, prefills, options.handover, report, gap)


class HandoverUpstream:
    """An upstream that gives prompts to Tritons for prompts first.

    Args:
        upstream: the Tritons that generate.
        prefills: those for prompts.
        handover: as `GatewayOptions.handover`, but not "off".
        report: called with the outcome of each handover.
        gap: called with the seconds between the first token of an answer and the next one.
    """

    def __init__(
        self,
        upstream: AnyUpstream,
        prefills: Sequence[PrefillTriton],
        handover: str,
        report: Callable[[Outcome], None] = lambda _: None,
        gap: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._upstream = upstream
        self._prefills = list(prefills)
        self._above = int(handover) if handover.isdigit() else None
        self._report = report
        self._gap = gap
        self._sent = SentPrefixes()
        self._costs: defaultdict[str, Costs] = defaultdict(Costs)

    def stream(self, **arguments: Any) -> AnyStream:
        """As `Upstream.stream`."""
        prompt, messages, ids = (arguments.pop(name, None) for name in ("prompt", "messages", "input_ids"))
        return self.send(GenerationRequest.build(prompt, messages, ids, arguments, model="", timeout=None))  # type: ignore[arg-type]

    def send(self, request: GenerationRequest) -> AnyStream:
        """As `Upstream.send`."""
        if not can_be_handed_over(request):
            return self._upstream.send(request)
        prompt, costs = self._sent.sent(request), self._costs[request.model]
        tokens = prompt.tokens - prompt.cached
        prefill = min((one for one in self._prefills if one.is_free), key=lambda one: one.queued, default=None)
        if self._above is not None:
            wanted = tokens > self._above
        else:
            wanted = pays(costs, time.monotonic(), tokens, 0 if prefill is None else prefill.queued)
        if wanted and prefill is None:
            self._report("busy")
        if prefill is None or not wanted:
            prefill = None
            if self._above is not None or tokens < LEAST_TOKENS:
                return self._upstream.send(request)
        return HandoverStream(self._upstream, request, prefill, prompt, costs, self._report, self._gap)

    async def resolve(self, name: str | None) -> ServedModel:
        """As `Upstream.resolve`."""
        return await self._upstream.resolve(name)

    async def find(self, name: str | None) -> ServedModel:
        """As `Upstream.find`."""
        return await self._upstream.find(name)

    async def models(self) -> list[ServedModel]:
        """As `Upstream.models`."""
        return await self._upstream.models()

    async def adapter(self, name: str) -> ServedModel | None:
        """As `Upstream.adapter`."""
        return await self._upstream.adapter(name)

    def forget(self) -> None:
        """As `Upstream.forget`."""
        self._upstream.forget()
        for prefill in self._prefills:
            prefill.upstream.forget()

    async def ready(self) -> bool:
        """Whether the Tritons that generate can serve; they do so without the others."""
        return await self._upstream.ready()

    async def tokenize(self, model: ServedModel, **question: Any) -> dict[str, Any]:
        """As `Upstream.tokenize`."""
        return await self._upstream.tokenize(model, **question)

    async def detokenize(self, model: ServedModel, token_ids: list[int]) -> str:
        """As `Upstream.detokenize`."""
        return await self._upstream.detokenize(model, token_ids)

    async def tokenizer_info(self, model: ServedModel) -> dict[str, Any]:
        """As `Upstream.tokenizer_info`."""
        return await self._upstream.tokenizer_info(model)

    async def close(self) -> None:
        """As `Upstream.close`."""
        await self._upstream.close()
        for prefill in self._prefills:
            await prefill.upstream.close()
