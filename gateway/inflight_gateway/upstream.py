"""The Tritons behind a gateway: one client for all of them, and what they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight_client import AsyncClient, AsyncStream, InflightError, RetryPolicy
from inflight_gateway.errors import api_error, invalid, model_not_found
from inflight_gateway.options import GatewayOptions

__all__ = ["ServedModel", "Upstream", "text_inputs"]

_LIST_SECONDS = 2.0  # for which the list of models is remembered
_INFO_SECONDS = 30.0  # for which what a model says of itself is remembered

# A model that has these takes text and answers with text: this contract's, and vllm_backend's own.
_REQUIRED_INPUTS = {"text_input", "stream", "sampling_parameters"}
_REQUIRED_OUTPUTS = {"text_output"}


@dataclass(frozen=True)
class ServedModel:
    """A model that takes text.

    Attributes:
        name: Triton's.
        inputs, outputs: their names.
        info: what the model says of itself, see `AsyncClient.model_info`; empty for other backends.
        since: when this process first saw it, in seconds since 1970.
    """

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    info: Mapping[str, Any] = field(default_factory=dict)
    since: int = 0

    @property
    def is_inflight(self) -> bool:
        """Whether it speaks the whole wire contract."""
        return "input_ids" in self.inputs and "resume_token_ids" in self.inputs


def text_inputs(metadata: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]] | None:
    """Names of a model's inputs and outputs, from its metadata; None if it does not take text."""
    inputs = frozenset(entry["name"] for entry in metadata.get("inputs", ()))
    outputs = frozenset(entry["name"] for entry in metadata.get("outputs", ()))
    fits = inputs >= _REQUIRED_INPUTS and outputs >= _REQUIRED_OUTPUTS
    return (inputs, outputs) if fits else None


class Upstream:
    """All calls to Triton go through here.

    Args:
        options: addresses, headers and limits.
        client: takes the place of an `AsyncClient`, in tests.
    """

    def __init__(self, options: GatewayOptions, client: Any = None) -> None:
        self._options = options
        self.client: AsyncClient = client or _client(options)
        self._known: dict[str, tuple[float, ServedModel]] = {}
        self._since: dict[str, int] = {}
        self._listed: tuple[float, list[ServedModel]] = (float("-inf"), [])
        self._lock = asyncio.Lock()

    def stream(self, **arguments: Any) -> AsyncStream:
        """Send a request; arguments as `AsyncClient.stream` takes them."""
        return self.client.stream(**arguments)

    async def resolve(self, name: str | None) -> ServedModel:
        """The model of a request; None stands for the only one.

        Raises:
            APIError: 404 for a model that does not exist or takes no text, 400 if a name is needed, 503.
        """
        if name is None:
            models = await self.models()
            if len(models) != 1:
                names = ", ".join(model.name for model in models) or "none"
                raise invalid(f"model: give the name of a model; models here: {names}", "model")
            return models[0]
        known = self._known.get(name)
        if known is not None and time.monotonic() - known[0] < _INFO_SECONDS:
            return known[1]
        model = await self._look_up(name)
        if model is None:
            raise model_not_found(name, [one.name for one in await self.models()])
        return model

    async def models(self) -> list[ServedModel]:
        """The models that take text and are ready.

        Raises:
            APIError: 503.
        """
        async with self._lock:
            if time.monotonic() - self._listed[0] > _LIST_SECONDS:
                found = [await self._look_up(name) for name in await self._names()]
                self._listed = time.monotonic(), [model for model in found if model is not None]
            return self._listed[1]

    async def ready(self) -> bool:
        """Whether a model that takes text can serve."""
        try:
            models = await self.models()
        except Exception:
            return False
        for model in models:
            if await self.client.ready(model.name):
                return True
        return False

    async def _names(self) -> list[str]:
        if self._options.models:
            return list(self._options.models)
        try:
            return sorted({entry["name"] for entry in await self.client.repository_index()})
        except InflightError as error:
            raise api_error(error) from None

    async def _look_up(self, name: str) -> ServedModel | None:
        """Ask Triton; None if the model does not exist, is not loaded or takes no text."""
        try:
            metadata = await self.client.metadata(name)
        except InflightError as error:
            self._known.pop(name, None)
            found = api_error(error)
            if found.status >= 500 and found.code == "upstream_unreachable":
                raise found from None
            return None
        names = text_inputs(metadata)
        if names is None:
            return None
        since = self._since.setdefault(name, int(time.time()))
        model = ServedModel(name, *names, info=await self._info(name, names[0]), since=since)
        self._known[name] = time.monotonic(), model
        return model

    async def _info(self, name: str, inputs: frozenset[str]) -> Mapping[str, Any]:
        if "resume_token_ids" not in inputs:  # not Inflight's backend: it would take the question for a prompt
            return {}
        ask: Any = getattr(self.client, "model_info", None)
        try:
            return {} if ask is None else dict(await ask(name))
        except InflightError:
            return {}

    async def close(self) -> None:
        """Cancel open requests and close the connections."""
        await self.client.close()


def _client(options: GatewayOptions) -> AsyncClient:
    retries = RetryPolicy(max_attempts=8, max_delay=2.0, max_retry_after=1.0, resume=True)
    return AsyncClient(list(options.triton), model="", retries=retries, headers=dict(options.headers))
