"""A Triton for prompts and one that continues, both scripted, behind a gateway's upstream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripted_client import Script, ScriptedClient, text

from inflight_client import (
    ChoiceDelta,
    StreamChunk,
)
from inflight_client.request import GenerationRequest
from inflight_gateway.handover import HandoverUpstream, PrefillTriton
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream

__all__ = ["IDS", "Pair", "first", "request"]

IDS = list(range(300))


def request(prompt: Any = IDS, **options: Any) -> GenerationRequest:
    kind = {"input_ids": prompt} if isinstance(prompt, list) and isinstance(prompt[0], int) else {}
    if isinstance(prompt, str):
        kind = {"prompt": prompt}
    return GenerationRequest.build(
        kind.get("prompt"), None if kind else prompt, kind.get("input_ids"), options, model="demo", timeout=None
    )  # type: ignore[arg-type]


def first(*, token: int = 5, prompt: int = 300, cached: int = 12, finish: str | None = None) -> StreamChunk:
    delta = ChoiceDelta(index=0, text="A", token_ids=[token], num_tokens=1, finish_reason=finish)
    return StreamChunk([delta], num_input_tokens=prompt, num_cached_tokens=cached)


class Pair:
    """A Triton for prompts and one that continues."""

    def __init__(self, prefill: Callable[[GenerationRequest], Script], handover: str = "100", count: int = 1) -> None:
        self.decode = ScriptedClient(self._answer)
        self.prefills = [ScriptedClient(prefill) for _ in range(count)]
        self.outcomes: list[str] = []
        self.gaps: list[float] = []
        self.now = 0.0
        options = GatewayOptions(reconnect_timeout=0)
        tritons = [
            PrefillTriton(f"p{i}:1", Upstream(options, one), lambda: self.now) for i, one in enumerate(self.prefills)
        ]
        decode = Upstream(options, self.decode)
        self.upstream = HandoverUpstream(decode, tritons, handover, self.outcomes.append, self.gaps.append)

    @staticmethod
    def _answer(request: GenerationRequest) -> Script:
        rest = [text("B", prompt=300)[0], text("C", prompt=300)[0]]
        rest[0].choices[0].finish_reason = None
        rest[0].num_cached_tokens = 288
        return rest if request.resume_token_ids else [first(cached=3), *rest]

    async def again(self, number: int, **options: Any) -> str:
        """The text for another prompt."""
        return (await self.run(list(range(1000 * number, 1000 * number + 300)), **options))[0]

    async def run(self, prompt: Any = IDS, **options: Any) -> tuple[str, Any]:
        """The text that arrives, and the result."""
        stream = self.upstream.send(request(prompt, **options))
        found = [chunk.text async for chunk in stream]
        return "".join(found), stream.result()
