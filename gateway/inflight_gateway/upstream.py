"""The Tritons behind a gateway: one client for all of them, and their models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from inflight_client import (
    AsyncClient,
    AsyncStream,
    DeadlineExceededError,
    GenerationResult,
    InflightError,
    RetryPolicy,
    ServerUnreachableError,
    StreamChunk,
)
from inflight_client.pooling import Pooled
from inflight_client.request import GenerationRequest
from inflight_gateway.errors import APIError, api_error, invalid, model_not_found, request_error
from inflight_gateway.options import GatewayOptions
from inflight_gateway.routing import Router
from inflight_gateway.waiting import WaitingRequests

__all__ = ["AnyStream", "AnyUpstream", "ServedModel", "Upstream", "adapter_ids", "only_model", "text_inputs"]

_LIST_SECONDS = 2.0  # for which the list of models is cached
_FIRST_DELAY, _MAX_DELAY = 0.1, 2.0  # seconds between attempts to reach a server
_INFO_SECONDS = 30.0  # for which the facts about a model are cached
_ASK_SECONDS = 5.0  # for a model to answer; a stub that is stopped or hangs never does

# A model with these takes text and answers with text: models of this contract, and of vllm_backend.
_REQUIRED_INPUTS = {"text_input", "stream", "sampling_parameters"}
_REQUIRED_OUTPUTS = {"text_output"}
_RESTRICTED = "protocol is restricted"  # Triton's words for a call without the admin key
_NO_LIST = (
    "the model is not known, and this Triton lists its models only with the admin key; start the gateway with "
    "INFLIGHT_ADMIN_KEY, or name the models with --model"
)
_RESUMES = "resume_token_ids"  # only this project's backend has this input


@dataclass(frozen=True)
class ServedModel:
    """A model that takes text.

    Attributes:
        name: Triton's.
        inputs, outputs: their names.
        info: facts about the model, see `AsyncClient.model_info`; empty for other backends.
        since: when this process first saw it, in seconds since 1970.
        adapter: its adapter that a request chose; None: none.
        id: the name by which callers ask for the model, or for it with this adapter.
    """

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    info: Mapping[str, Any] = field(default_factory=dict)
    since: int = 0
    adapter: str | None = None
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", self.name)

    @property
    def adapters(self) -> Mapping[str, str]:
        """Its adapters: name -> id of the content."""
        return self.info.get("adapters") or {}

    def with_adapter(self, adapter: str, id: str) -> ServedModel:
        """The model with one of its adapters."""
        return dataclasses.replace(self, adapter=adapter, id=id)

    @property
    def is_inflight(self) -> bool:
        """Whether it implements the whole wire contract."""
        return _RESUMES in self.inputs


def text_inputs(metadata: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]] | None:
    """Names of a model's inputs and outputs, from its metadata; None if it does not take text."""
    inputs = frozenset(entry["name"] for entry in metadata.get("inputs", ()))
    outputs = frozenset(entry["name"] for entry in metadata.get("outputs", ()))
    fits = inputs >= _REQUIRED_INPUTS and outputs >= _REQUIRED_OUTPUTS
    return (inputs, outputs) if fits else None


def only_model(models: list[ServedModel]) -> ServedModel:
    """The model of a request that names none.

    Raises:
        APIError: 400, there is not exactly one.
    """
    if len(models) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise invalid(f"model: give the name of a model; models here: {names}", "model")
    return models[0]


def adapter_ids(models: Sequence[ServedModel]) -> Iterator[tuple[ServedModel, str | None, str]]:
    """The models, each followed by its adapters: model, name of the adapter, id by which it is asked for.

    An adapter is asked for by its name; by MODEL/NAME if that name is a model's, or an adapter's of several models.
    There can be 10,000, so each is made only when the caller takes it.
    """
    for model in models:
        yield model, None, model.id
        for name in model.adapters:
            num_takers = sum(name == one.name or name in one.adapters for one in models)
            yield model, name, name if num_takers == 1 else f"{model.name}/{name}"


class AnyStream(Protocol):
    """A request's chunks, from whichever Tritons; members as of `AsyncStream`."""

    pooled: Pooled | None

    @property
    def resumptions(self) -> int: ...
    @property
    def num_input_tokens(self) -> int | None: ...
    def __aiter__(self) -> AsyncIterator[StreamChunk]: ...
    def result(self) -> GenerationResult: ...
    def cancel(self) -> None: ...


class AnyUpstream(Protocol):
    """The Tritons behind a gateway, whether they serve the same models or not; methods as of `Upstream`."""

    def stream(self, **arguments: Any) -> AnyStream: ...
    def send(self, request: GenerationRequest) -> AnyStream: ...
    async def resolve(self, name: str | None) -> ServedModel: ...
    async def find(self, name: str | None) -> ServedModel: ...
    async def models(self) -> list[ServedModel]: ...
    async def adapter(self, name: str) -> ServedModel | None: ...
    def forget(self) -> None: ...
    async def ready(self) -> bool: ...
    async def tokenize(self, model: ServedModel, **question: Any) -> dict[str, Any]: ...
    async def detokenize(self, model: ServedModel, token_ids: list[int]) -> str: ...
    async def tokenizer_info(self, model: ServedModel) -> dict[str, Any]: ...
    async def close(self) -> None: ...


class Upstream:
    """Makes all calls to Tritons that serve the same models.

    Args:
        options: addresses, headers and limits.
        client: replaces both clients, in tests.
        routed: called with the address of the Triton chosen for an attempt, and the reason.

    Attributes:
        waiting: counts the requests that wait for these.
    """

    def __init__(
        self,
        options: GatewayOptions,
        client: Any = None,
        routed: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._options = options
        self.client: AsyncClient = client or _client(options, True, routed)
        # Other backends do not support resumption, or the outputs that it needs.
        self._plain: AsyncClient = client or _client(options, False, routed)
        self._known: dict[str, tuple[float, ServedModel]] = {}
        self._since: dict[str, int] = {}
        self._listed: tuple[float, list[ServedModel]] = (float("-inf"), [])
        self._unlisted: tuple[float, APIError | None] = (float("-inf"), None)  # when a list failed last, and how
        self._lock = asyncio.Lock()
        self.waiting = WaitingRequests(options.max_open_requests)

    def stream(self, **arguments: Any) -> AsyncStream:
        """Send a request; arguments as for `AsyncClient.stream`, with a resolved `model`."""
        return self._client_of(arguments["model"]).stream(**arguments)

    def send(self, request: GenerationRequest) -> AsyncStream:
        """Send a request for a resolved model."""
        return self._client_of(request.model).send(request)

    def _client_of(self, model: str) -> AsyncClient:
        known = self._known.get(model)
        return self.client if known is None or known[1].is_inflight else self._plain

    async def resolve(self, name: str | None) -> ServedModel:
        """The model of a request; None means the only one.  Waits for a server that cannot be reached.

        As many requests wait for an answer about their model as can be open, since each holds its body.

        Raises:
            APIError: as `find`; 503, too many wait.
        """
        known = None if name is None else self.remembered(name)
        if known is not None:
            return known
        delay, deadline = _FIRST_DELAY, time.monotonic() + self._options.reconnect_timeout
        with self.waiting.one():
            while True:
                try:
                    return await self.find(name)
                except APIError as error:
                    if error.code != "upstream_unreachable" or time.monotonic() + delay > deadline:
                        raise
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_DELAY)

    async def find(self, name: str | None) -> ServedModel:
        """A model; None means the only one.

        Raises:
            APIError: 404 for a model that does not exist or takes no text, 400 if a name is needed, 503.
        """
        if name is None:
            return only_model(await self.models())
        model = self.remembered(name)
        if model is None:
            model = await self._with_adapter(name)
            if model is not None and any(one.name == name for one in await self.models()):
                model = None  # a model's name comes before an adapter's
        model = model or await self._look_up(name) or await self.adapter(name)
        if model is None:
            models = await self.models()
            count = sum(1 + len(one.adapters) for one in models)
            raise model_not_found(name, (id for _, _, id in adapter_ids(models)), count)
        return model

    async def adapter(self, name: str) -> ServedModel | None:
        """The model with the adapter that has this id; None if there is none.  Asks anew if none is known.

        Raises:
            APIError: 503.
        """
        found = await self._with_adapter(name)
        if found is None and time.monotonic() - self._listed[0] > _LIST_SECONDS:
            self.forget()
            await self.models()
            found = self._known_adapter(name)
        return found

    def forget(self) -> None:
        """Ask anew about the models that have adapters: one was loaded or unloaded."""
        for name, (_, model) in self._known.items():
            if model.info.get("adapters") is not None:  # kept: it still holds if the model does not answer
                self._known[name] = float("-inf"), model
        self._listed = (float("-inf"), [])

    async def models(self) -> list[ServedModel]:
        """The models that take text and are loaded.

        Raises:
            APIError: 503.
        """
        asked = time.monotonic()
        async with self._lock:
            failed, error = self._unlisted
            if error is not None and failed >= asked:  # for another call, while this one waited
                raise error.again()
            if time.monotonic() - self._listed[0] > _LIST_SECONDS:
                try:
                    found = await self._list()
                except APIError as failure:
                    self._unlisted = time.monotonic(), failure.again()
                    raise
                self._listed, self._unlisted = (time.monotonic(), found), (float("-inf"), None)
            return self._listed[1]

    async def _list(self) -> list[ServedModel]:
        names = await self._names()
        found = await asyncio.gather(*[self._look_up(name) for name in names])
        for name in self._known.keys() - set(names):
            del self._known[name]
        return [model for model in found if model is not None]

    async def ready(self) -> bool:
        """Whether a model that takes text can serve: Triton says so, and a model of this project answers."""
        with contextlib.suppress(APIError, InflightError):
            for model in await self.models():
                if await (self.client.responds if model.is_inflight else self.client.ready)(model.name):
                    return True
        return False

    async def _names(self) -> list[str]:
        if self._options.models:
            return list(self._options.models)
        try:
            return sorted({entry["name"] for entry in await self.client.repository_index()})
        except InflightError as error:
            if _RESTRICTED in error.message:  # with UNAVAILABLE, the code of a server that cannot be reached
                raise APIError(500, _NO_LIST, code="configuration_error") from None
            raise api_error(error) from None

    async def _with_adapter(self, name: str) -> ServedModel | None:
        """The known model with this adapter; asked again if it was asked too long ago."""
        found = self._known_adapter(name)
        if found is None or self.remembered(found.name) is not None:
            return found
        await self._look_up(found.name)
        return self._known_adapter(name)

    def _known_adapter(self, name: str) -> ServedModel | None:
        known = [model for _, model in self._known.values()]
        having = [model for model in known if name in model.adapters]
        if len(having) == 1:
            return having[0].with_adapter(name, name)
        for model in known:
            adapter = name.removeprefix(f"{model.name}/")
            if adapter != name and adapter in model.adapters:
                return model.with_adapter(adapter, name)
        return None

    def remembered(self, name: str) -> ServedModel | None:
        """A model whose facts are fresh."""
        seen, model = self._known.get(name, (float("-inf"), None))
        return model if time.monotonic() - seen < _INFO_SECONDS else None

    async def _look_up(self, name: str) -> ServedModel | None:
        """Ask Triton; None if the model does not exist, is not loaded or takes no text."""
        try:
            metadata = await self.client.metadata(name)
            names = text_inputs(metadata)
            remembered = self.remembered(name)
            if names is None or remembered is not None:
                return remembered if names else None
            info = await self._info(name) if _RESUMES in names[0] else {}
        except InflightError as error:
            self._known.pop(name, None)
            found = api_error(error)
            if found.code == "upstream_unreachable":
                raise found from None
            return None
        model = ServedModel(name, *names, info=info, since=self._since.setdefault(name, int(time.time())))
        self._known[name] = time.monotonic(), model
        return model

    async def _info(self, name: str) -> Mapping[str, Any]:
        try:
            return await self.client.model_info(name, timeout=_ASK_SECONDS)
        except ServerUnreachableError:
            raise
        except DeadlineExceededError:  # its stub hangs: what it said last still holds if it comes back
            return self._known[name][1].info if name in self._known else {}
        except InflightError:  # an older version
            return {}

    async def tokenize(self, model: ServedModel, **question: Any) -> dict[str, Any]:
        """Token ids of a prompt, as `AsyncClient.tokenize` returns them.

        Raises:
            APIError: the model cannot tell, or the prompt is invalid.
        """
        self._check_inflight(model)
        try:
            return await self.client.tokenize(**question, model=model.name)
        except (InflightError, ValueError, TypeError) as error:
            raise request_error(error) from None

    async def detokenize(self, model: ServedModel, token_ids: list[int]) -> str:
        """The text of token ids.

        Raises:
            APIError: the model cannot tell, or an id is not one of its own.
        """
        self._check_inflight(model)
        try:
            return await self.client.detokenize(token_ids, model=model.name)
        except (InflightError, ValueError, TypeError) as error:
            raise request_error(error) from None

    async def tokenizer_info(self, model: ServedModel) -> dict[str, Any]:
        """The settings of a model's tokenizer, with its chat template.

        Raises:
            APIError: the model cannot tell.
        """
        self._check_inflight(model)
        try:
            return await self.client.tokenizer_info(model.name)
        except InflightError as error:
            raise request_error(error) from None

    @staticmethod
    def _check_inflight(model: ServedModel) -> None:
        if not model.is_inflight:
            raise invalid(f"the backend of model {model.name!r} does not tell the token ids of a text", "model")

    async def close(self) -> None:
        """Cancel open requests and close the connections."""
        await self.client.close()
        await self._plain.close()


def _client(options: GatewayOptions, resume: bool, routed: Callable[[str, str], None]) -> AsyncClient:
    # An unreachable server may be restarting: requests and open streams wait for it.  A refusal is final: the caller
    # gets it at once, unless another server accepts the request.
    retries = RetryPolicy(
        outage_timeout=options.reconnect_timeout,
        max_delay=_MAX_DELAY,
        max_retry_after=1.0,
        max_refusals=len(options.triton),
        resume=resume,
    )
    routing = None
    if options.routing != "ordered":
        routing = Router(
            options.routing, options.triton, options.routing_prefix_tokens, options.routing_load_factor, routed
        )
    headers = dict(options.headers)
    return AsyncClient(
        list(options.triton),
        model="",
        retries=retries,
        routing=routing,
        headers=headers,
        round_robin=options.routing == "round-robin",
    )
