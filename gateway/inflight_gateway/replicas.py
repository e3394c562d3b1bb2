"""The state of each Triton and of each of its models, for people who look at the page; and what all of them do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from inflight_client import (
    AsyncClient,
    DeadlineExceededError,
    InflightError,
    InvalidRequestError,
    ServerUnreachableError,
)
from inflight_gateway.errors import APIError
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import AnyUpstream, ServedModel

__all__ = ["Fleet", "ModelState", "Replicas", "TritonState"]

_SHARED_SECONDS = 1.0  # for which all readers get the same answer
_ASK_SECONDS = 2.0  # for a Triton, and for a model's answer, which takes up to one second
_CONTROL_SECONDS = 300.0  # for an adapter to be loaded
_NEEDS_KEY = "its load is unknown: start the gateway with the admin key of its Triton (INFLIGHT_ADMIN_KEY)"


class ModelState(msgspec.Struct):
    """A model on one Triton.  Numbers are null if the engine does not tell them.

    Attributes:
        model: its name.
        state: as `state` of the control request "stats", or "not loaded", or "unresponsive".
        reason: why it cannot serve, or why its load is unknown.
        instance: the one that answered; `generation_tokens` counts its output tokens.
        running, waiting: sequences.
        kv_blocks_used, kv_blocks: of the pool.
        prefix_queries, prefix_hits: prompt tokens looked up and found in the cache since the engine's start.
    """

    model: str
    state: str
    reason: str | None = None
    instance: str = ""
    running: int | None = None
    waiting: int | None = None
    kv_blocks_used: int | None = None
    kv_blocks: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    generation_tokens: int | None = None


class TritonState(msgspec.Struct):
    """A Triton; `up`: it answers."""

    address: str
    up: bool
    models: list[ModelState]


@dataclass(frozen=True)
class Fleet:
    """All Tritons at one time.

    Attributes:
        time: seconds by this machine's monotonic clock.
        models: that are ready on the first Triton that answers.
        problem: why no model is known, or None.
    """

    time: float
    models: list[ServedModel]
    tritons: list[TritonState]
    problem: str | None


# The parts of the answer to "stats" that are shown.


class _Load(msgspec.Struct):
    running: int
    waiting: int
    blocks_used: int
    blocks_free: int
    prefix_queries_total: int
    prefix_hits_total: int


class _Engine(msgspec.Struct):
    load: _Load


class _Frontend(msgspec.Struct):
    generation_tokens: int | None = None  # older versions do not have it


class _Stats(msgspec.Struct):
    state: str
    reason: str | None
    instance: str
    frontend: _Frontend
    engine: _Engine | None


class Replicas:
    """Asks every Triton, including the ones that get no requests at the moment.

    Args:
        options: addresses, headers and the admin key.
        upstream: knows the models.
        connect: makes the client for an address; replaced in tests.
        clock: seconds.
    """

    def __init__(
        self,
        options: GatewayOptions,
        upstream: AnyUpstream,
        connect: Callable[[str], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin_key = options.admin_key or None
        self._upstream = upstream
        self._clock = clock
        headers = dict(options.headers)
        make = connect or (
            lambda address: AsyncClient(address, model="", headers=headers, connect_timeout=_ASK_SECONDS)
        )
        self._groups = options.triton_groups
        self._clients = {address: make(address) for group in self._groups.values() for address in group}
        self._lock = asyncio.Lock()  # one question for all readers
        self._last: Fleet | None = None

    async def fleet(self) -> Fleet:
        """The present state, at most a second old."""
        async with self._lock:
            if self._last is None or self._clock() - self._last.time > _SHARED_SECONDS:
                self._last = await self._ask()
            return self._last

    async def control(
        self, model: ServedModel, name: str, parameters: Mapping[str, str | bool]
    ) -> dict[str, str | InflightError]:
        """Ask all Tritons of a model the same question, such as "load_adapter"; the answer or error of each."""
        addresses = list(self._addresses_of(model))
        answers = await asyncio.gather(
            *[
                self._clients[address].control(name, model.name, _CONTROL_SECONDS, self._admin_key, parameters)
                for address in addresses
            ],
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, InflightError):
                raise answer
        return dict(zip(addresses, answers))  # type: ignore[arg-type]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _ask(self) -> Fleet:
        models: Sequence[ServedModel] = ()
        problem = None
        try:
            models = await self._upstream.models()
        except APIError as error:
            problem = error.message
        tritons = await asyncio.gather(*[self._triton(address, models) for address in self._clients])
        return Fleet(self._clock(), list(models), tritons, problem)

    async def _triton(self, address: str, models: Sequence[ServedModel]) -> TritonState:
        client = self._clients[address]
        try:
            if not await client.health():
                return TritonState(address, False, [])
            asked = [model for model in models if address in self._addresses_of(model)]
            states = await asyncio.gather(*[self._model(client, model) for model in asked])
        except InflightError:
            return TritonState(address, False, [])
        return TritonState(address, True, states)

    def _addresses_of(self, model: ServedModel) -> Sequence[str]:
        """The Tritons that get the model's requests (`ModelUpstreams`)."""
        return self._groups.get(model.name) or self._groups.get("", ())

    async def _model(self, client: Any, model: ServedModel) -> ModelState:
        """Raises ServerUnreachableError."""
        if not model.is_inflight:
            return await self._unmeasured(client, model, None)
        try:
            answer = await client.control("stats", model.name, _ASK_SECONDS, self._admin_key)
            return _state(model.name, msgspec.json.decode(answer, type=_Stats))
        except ServerUnreachableError:
            raise
        except DeadlineExceededError:  # Triton reports it as ready
            return ModelState(model.name, "unresponsive", f"no answer within {_ASK_SECONDS:g} s")
        except InvalidRequestError as error:
            return await self._unmeasured(client, model, None if error.code == "NOT_FOUND" else _NEEDS_KEY)
        except InflightError as error:  # its stub is dead, or it has just been unloaded
            state = await self._unmeasured(client, model, error.message)
            return state if state.reason is None else ModelState(model.name, "unresponsive", error.message)
        except msgspec.MsgspecError as error:
            return await self._unmeasured(client, model, f"its load is unknown: {error}")

    @staticmethod
    async def _unmeasured(client: Any, model: ServedModel, reason: str | None) -> ModelState:
        ready = await client.ready(model.name)
        return ModelState(model.name, "ready" if ready else "not loaded", reason if ready else None)


def _state(name: str, found: _Stats) -> ModelState:
    state = ModelState(
        name, found.state, found.reason, found.instance, generation_tokens=found.frontend.generation_tokens
    )
    if found.engine is not None:
        load = found.engine.load
        state.running, state.waiting = load.running, load.waiting
        state.kv_blocks_used, state.kv_blocks = load.blocks_used, load.blocks_used + load.blocks_free
        state.prefix_queries, state.prefix_hits = load.prefix_queries_total, load.prefix_hits_total
    return state
