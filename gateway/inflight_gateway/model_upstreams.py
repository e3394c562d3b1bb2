"""Several models behind one gateway: each has Tritons of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from inflight_client import AsyncStream
from inflight_client.request import GenerationRequest
from inflight_gateway.errors import APIError, model_not_found
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import AnyUpstream, ServedModel, Upstream, only_model
from inflight_gateway.waiting import WaitingRequests

__all__ = ["ModelUpstreams", "upstream_for"]


def upstream_for(options: GatewayOptions, routed: Callable[[str, str], None]) -> AnyUpstream:
    """The Tritons that `options.triton` lists."""

    def group(addresses: tuple[str, ...], models: tuple[str, ...]) -> Upstream:
        return Upstream(dataclasses.replace(options, triton=addresses, models=models), routed=routed)

    groups = dict(options.triton_groups)
    others = groups.pop("", None)
    if not groups:
        return group(options.triton, options.models)
    named = {model: group(addresses, (model,)) for model, addresses in groups.items()}
    rest = None if others is None else group(others, options.models)
    return ModelUpstreams(named, rest, WaitingRequests(options.max_open_requests))


class ModelUpstreams:
    """Gives each request to the Tritons of the model that it names.

    Args:
        named: by model.
        others: of all other models.
        waiting: counts the requests that wait for an answer of all of these; each counts those for it alone.
    """

    def __init__(self, named: dict[str, Upstream], others: Upstream | None, waiting: WaitingRequests) -> None:
        self._named = named
        self._others = others
        self._waiting = waiting
        self._all = [*named.values(), *([] if others is None else [others])]

    def stream(self, **arguments: Any) -> AsyncStream:
        """As `Upstream.stream`."""
        return self._of(arguments["model"]).stream(**arguments)

    def send(self, request: GenerationRequest) -> AsyncStream:
        """As `Upstream.send`."""
        return self._of(request.model).send(request)

    async def resolve(self, name: str | None) -> ServedModel:
        """As `Upstream.resolve`."""
        if name in self._named:
            return await self._named[name].resolve(name)
        if name is not None and self._others is not None:
            if self._others.remembered(name) is not None:
                return await self._others.resolve(name)
            with self._others.waiting.one():
                is_of_others = await self._is_of_others(name)
            if is_of_others:
                return await self._others.resolve(name)
        with self._waiting.one():
            if name is None:
                return await self.find(None)
            found = await self.adapter(name)
        return await self._of(name if found is None else found.name).resolve(name)

    async def find(self, name: str | None) -> ServedModel:
        """As `Upstream.find`."""
        return only_model(await self.models()) if name is None else await (await self._with(name)).find(name)

    async def adapter(self, name: str) -> ServedModel | None:
        """As `Upstream.adapter`."""
        found = await asyncio.gather(*[one.adapter(name) for one in self._all], return_exceptions=True)
        unexpected = [one for one in found if isinstance(one, BaseException) and not isinstance(one, APIError)]
        if unexpected:
            raise unexpected[0]
        having = [model for model in found if isinstance(model, ServedModel)]
        return having[0] if len(having) == 1 else None  # of several models, one must be named: MODEL/NAME

    def forget(self) -> None:
        """As `Upstream.forget`."""
        for one in self._all:
            one.forget()

    async def models(self) -> list[ServedModel]:
        """The loaded models; a model whose Tritons cannot be reached is left out, unless that is true of all."""
        found = await asyncio.gather(*[one.models() for one in self._all], return_exceptions=True)
        failures = [one for one in found if isinstance(one, BaseException)]
        unexpected = [error for error in failures if not isinstance(error, APIError)]
        if unexpected or len(failures) == len(found):
            raise (unexpected or failures)[0]
        models: dict[str, ServedModel] = {}
        for model in (model for one in found if isinstance(one, list) for model in one):
            models.setdefault(model.name, model)  # `others` can list one that has Tritons of its own
        return list(models.values())

    async def ready(self) -> bool:
        """Whether one of the models can serve."""
        return any(await asyncio.gather(*[one.ready() for one in self._all]))

    async def tokenize(self, model: ServedModel, **question: Any) -> dict[str, Any]:
        """As `Upstream.tokenize`."""
        return await self._of(model.name).tokenize(model, **question)

    async def detokenize(self, model: ServedModel, token_ids: list[int]) -> str:
        """As `Upstream.detokenize`."""
        return await self._of(model.name).detokenize(model, token_ids)

    async def tokenizer_info(self, model: ServedModel) -> dict[str, Any]:
        """As `Upstream.tokenizer_info`."""
        return await self._of(model.name).tokenizer_info(model)

    async def close(self) -> None:
        """As `Upstream.close`."""
        await asyncio.gather(*[one.close() for one in self._all])

    async def _with(self, name: str) -> Upstream:
        """The Tritons of a model, or of the model that has this adapter."""
        if name in self._named or await self._is_of_others(name):
            return self._of(name)
        found = await self.adapter(name)
        return self._of(name if found is None else found.name)

    async def _is_of_others(self, name: str) -> bool:
        """Whether it is a model of the Tritons that are not named; yes, if they cannot be asked: they say so."""
        if self._others is None:
            return False
        try:
            return any(model.name == name for model in await self._others.models())
        except APIError:
            return True

    def _of(self, name: str) -> Upstream:
        """The Tritons that have, or could have, a model; raises the error for one that none has."""
        found = self._named.get(name) or self._others
        if found is None:
            raise model_not_found(name, self._named, len(self._named))
        return found
