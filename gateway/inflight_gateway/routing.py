"""Chooses one of several Tritons for a request, by the policy of `--routing`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from inflight_client.request import GenerationRequest
from inflight_gateway.affinity import BoundedRing, Choice, Why, key_of

__all__ = ["CHARACTERS", "POLICIES", "Policy", "Router", "leading_text", "prefix_key"]

Policy = Literal["ordered", "round-robin", "least-loaded", "prefix"]
POLICIES: tuple[str, ...] = get_args(Policy)

CHARACTERS = 4  # of a token, about
_BLOCK = 16  # tokens: fewer are in no prefix cache


class Router:
    """Chooses servers for the client library (`inflight_client.Routing`), and reports the choices.

    Args:
        policy: any except "ordered", which the library implements.
        servers: their addresses.
        prefix_tokens: number of a prompt's first tokens that count as its prefix.
        load_factor: see `BoundedRing`.
        chosen: called with an address and the reason.

    Raises:
        ValueError: a duplicate address.
    """

    def __init__(
        self,
        policy: Policy,
        servers: Sequence[str],
        prefix_tokens: int,
        load_factor: float,
        chosen: Callable[[str, Why], None],
    ) -> None:
        self._servers = list(servers)
        self._prefix_tokens = prefix_tokens
        self._chosen = chosen
        self._ring = BoundedRing(servers, load_factor)
        self._last = -1
        policies: dict[str, Callable[[GenerationRequest, Mapping[int, int]], Choice]] = {
            "round-robin": lambda request, loads: self._next(list(loads)),
            "least-loaded": lambda request, loads: self._least(loads),
            "prefix": self._by_prefix,
        }
        self._choose = policies[policy]

    def choose(self, request: GenerationRequest, loads: Mapping[int, int]) -> int:
        """Index of the server for an attempt; see `inflight_client.Routing`."""
        server, why = self._choose(request, loads)
        self._chosen(self._servers[server], why)
        return server

    def _by_prefix(self, request: GenerationRequest, loads: Mapping[int, int]) -> Choice:
        key = prefix_key(request, self._prefix_tokens)
        return self._least(loads) if key is None else self._ring.choose(key, loads)

    def _least(self, loads: Mapping[int, int]) -> Choice:
        smallest = min(loads.values())
        return self._next([server for server, load in loads.items() if load == smallest])

    def _next(self, servers: Sequence[int]) -> Choice:
        """Each of the servers in turn."""
        self._last = min(servers, key=lambda server: (server <= self._last, server))
        return Choice(self._last, "balanced")


def prefix_key(request: GenerationRequest, tokens: int) -> str | None:
    """A key that is equal for requests that can share KV blocks and have the same `routing_key`.

    Prompts with equal beginnings share blocks within a model, an adapter, a tenant and a cache salt.

    Args:
        request: of any kind.
        tokens: number of the prompt's first tokens that count.  Text is not tokenised: four characters count as one.

    Returns:
        None if the prompt is too short to fill a block.
    """
    names = (request.adapter, request.tenant, request.cache_salt, request.routing_key)
    group = [request.model, *(name or "" for name in names)]
    if request.input_ids is not None:
        ids = request.input_ids[:tokens]
        return key_of([*group, "ids", *map(str, ids)]) if len(ids) >= _BLOCK else None
    text = leading_text(request, tokens * CHARACTERS)
    return key_of([*group, "text", text]) if len(text) >= _BLOCK * CHARACTERS else None


def leading_text(request: GenerationRequest, length: int) -> str:
    """The first characters of a prompt, not yet tokenised; equal for prompts that begin alike."""
    if request.prompt is not None:
        return request.prompt[:length]
    text = ""
    for part in _chat_parts(request, length):
        text += part
        if len(text) >= length:
            break
    return text[:length]


def _chat_parts(request: GenerationRequest, length: int) -> Iterator[str]:
    """A chat in the order in which templates write it: tools, then messages."""
    if tools := request.chat.get("tools"):
        yield _json(tools)
    for message in request.messages or ():
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name != "content"}
        yield _json(rest) + (content[:length] if isinstance(content, str) else _json(content))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
