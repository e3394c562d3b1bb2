"""Prompts that some Tritons compute, and answers that others generate: `--prefill-triton`, `--handover`.

The Tritons of both kinds have a KV tier in common (docs/memory.md).  The engine that generates looks there for the KV
of the prompt, by its content, and computes what it does not find.  So the Triton for prompts owes nothing: whatever
happens to it, the answer is that of one Triton.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inflight_client import DeadlineExceededError, InflightError, ServerUnreachableError
from inflight_client.request import GenerationRequest
from inflight_gateway.handover_policy import (
    LEAST_TOKENS,
    Costs,
    Rest,
    SentPrefixes,
    can_be_handed_over,
    is_wanted,
    least_tokens,
)
from inflight_gateway.handover_stream import HandoverStream, Outcome
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import AnyStream, AnyUpstream, ServedModel, Upstream, text_inputs

__all__ = ["HandoverUpstream", "PrefillTriton", "with_handover"]

_log = logging.getLogger("inflight_gateway")

_FACTS_SECONDS = 1.0  # for which what a Triton serves is remembered: another checkpoint must not compute first tokens
_MISMATCH_SECONDS = 2.0  # for which a Triton is not asked again for a model or adapter that it does not have
_COUNTED_SECONDS = 5.0  # for which a name has so many addresses
_ASK_SECONDS = 5.0  # for it to tell what it serves


async def num_addresses(address: str) -> int | None:
    """Of the host of a `host:port`; None: the name cannot be resolved now."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError, UnicodeError):
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return len({where[0] for family, *_, where in found if family == found[0][0]})
    return None


class PrefillTriton:
    """A Triton for prompts.

    After a failure it rests.

    Args:
        address: `host:port`; a name with several addresses is that of as many Tritons, which get prompts in turn.
        upstream: calls it; no call is repeated.
        clock: seconds.
        count: addresses of a `host:port`; None: not known now, so the last number stays.

    Attributes:
        queued: tokens of prompts that it computes now, for this process.
    """

    def __init__(
        self,
        address: str,
        upstream: Upstream,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[str], Awaitable[int | None]] = num_addresses,
    ) -> None:
        self.address = address
        self.upstream = upstream
        self.queued = 0
        self._clock, self._count = clock, count
        self._servers, self._counted = 1, float("-inf")
        self._counting: asyncio.Task[None] | None = None
        self._rest = Rest()
        self._facts: dict[str, tuple[float, ServedModel | None]] = {}
        self._mismatches: dict[tuple[str, str | None], float] = {}
        self._told: set[tuple[str, str | None]] = set()

    @property
    def is_free(self) -> bool:
        return self._rest.is_over(self._clock(), self.queued)

    @property
    def ahead(self) -> int:
        """Tokens of prompts before the next one: of several servers, each has its share."""
        return self.queued // self._servers

    def may_serve(self, model: str, adapter: str | None) -> bool:
        """Whether it did not lack them a moment ago."""
        return self._clock() - self._mismatches.get((model, adapter), float("-inf")) >= _MISMATCH_SECONDS

    async def facts(self, model: str) -> ServedModel | None:
        """Its model of this name, as of at most a second ago; None: it does not serve it.

        Raises:
            InflightError: it cannot be reached, or does not answer.
        """
        if self._clock() - self._counted >= _COUNTED_SECONDS and (self._counting is None or self._counting.done()):
            self._counted = self._clock()
            self._counting = asyncio.create_task(self._count_servers())  # a slow name server delays no prompt
        asked, found = self._facts.get(model, (float("-inf"), None))
        if self._clock() - asked >= _FACTS_SECONDS:
            asked = self._clock()
            found = await self._ask(model)
            self._facts[model] = asked, found
        return found

    async def _ask(self, model: str) -> ServedModel | None:
        client = self.upstream.client
        try:
            names = text_inputs(await client.metadata(model))
            return names and ServedModel(model, *names, info=await client.model_info(model, timeout=_ASK_SECONDS))
        except (ServerUnreachableError, DeadlineExceededError):
            raise
        except InflightError:  # no such model, it is not loaded, or of another backend
            return None

    async def _count_servers(self) -> None:
        self._servers = await self._count(self.address) or self._servers

    async def close(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
        await self.upstream.close()

    def forget(self) -> None:
        """Ask anew what it serves."""
        self._facts.clear()
        self._mismatches.clear()

    def answered(self, model: str, adapter: str | None) -> None:
        self._rest.answered()
        self._told.discard((model, adapter))

    def mismatched(self, model: str, adapter: str | None) -> None:
        """It serves something else under these names, or nothing."""
        now = self._clock()
        self._mismatches = {key: at for key, at in self._mismatches.items() if now - at < _MISMATCH_SECONDS}
        self._mismatches[model, adapter] = now
        if (model, adapter) not in self._told:
            self._told.add((model, adapter))
            what = f"model {model!r}" if adapter is None else f"adapter {adapter!r} of model {model!r}"
            _log.warning("the Triton for prompts at %s does not serve %s as the others do", self.address, what)

    def failed(self, why: str, retry_after: float | None = None) -> None:
        seconds = self._rest.failed(self._clock(), retry_after)
        if seconds is not None:
            _log.warning("the Triton for prompts at %s gets none for %g s: %s", self.address, seconds, why)


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
        return Upstream(
            dataclasses.replace(
                options,
                triton=(address,),
                models=(),
                prefill_triton=(),
                handover="",
                routing="round-robin",  # among the addresses of a name, such as that of several pods
                reconnect_timeout=0.0,
            )
        )

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
        self._above = least_tokens(handover)
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
        free = sorted((one for one in self._prefills if one.is_free), key=lambda one: one.ahead)
        prefills = [one for one in free if one.may_serve(request.model, request.adapter)]
        ahead = prefills[0].ahead if prefills else 0
        wanted = is_wanted(self._above, costs, time.monotonic(), tokens, ahead)
        if wanted and not prefills:
            self._report("mismatch" if free else "busy")
        if not wanted or not prefills:
            prefills = []
            if self._above is not None or tokens < LEAST_TOKENS:
                return self._upstream.send(request)
        return HandoverStream(self._upstream, request, prefills, prompt, costs, self._report, self._gap)

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
            prefill.forget()

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
            await prefill.close()
