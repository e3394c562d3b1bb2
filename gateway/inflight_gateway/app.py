"""The application: maps paths to the functions that answer them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from inflight_gateway.anthropic.count_tokens import count_tokens
from inflight_gateway.anthropic.errors import anthropic_error
from inflight_gateway.anthropic.messages import messages
from inflight_gateway.anthropic.messages_body import CountTokensBody, MessagesBody
from inflight_gateway.bodies import Body
from inflight_gateway.chat import chat_completions
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.classify import classify
from inflight_gateway.completions import CompletionBody, completions
from inflight_gateway.connections import STATE, Connections
from inflight_gateway.direct_routes import DirectRoutes
from inflight_gateway.embeddings import embeddings
from inflight_gateway.errors import APIError, ErrorForm, error_response
from inflight_gateway.front import Front, Keys
from inflight_gateway.gateway import Gateway
from inflight_gateway.generation import ClientGone
from inflight_gateway.health import health, load, ready, version
from inflight_gateway.hosts import AllowedHosts
from inflight_gateway.input_tokens import InputTokensBody, input_tokens
from inflight_gateway.lora_adapters import (
    LoadAdapterBody,
    UnloadAdapterBody,
    load_lora_adapter,
    unload_lora_adapter,
)
from inflight_gateway.metrics import metrics
from inflight_gateway.models import list_models, models_error, retrieve_model
from inflight_gateway.ollama import ollama_chat, ollama_generate
from inflight_gateway.ollama_embed import OllamaEmbedBody, OllamaEmbeddingsBody, ollama_embed, ollama_embeddings
from inflight_gateway.ollama_input import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from inflight_gateway.ollama_models import (
    ollama_absent,
    ollama_error,
    ollama_ps,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from inflight_gateway.openapi import ApiPages
from inflight_gateway.options import GatewayOptions
from inflight_gateway.page.files import OPEN_PATHS, front_page, page_file
from inflight_gateway.page.status import page_status
from inflight_gateway.pooled_bodies import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from inflight_gateway.rerank import rerank
from inflight_gateway.response_headers import WARNING, ResponseHeaders
from inflight_gateway.responses import responses
from inflight_gateway.responses_input import ResponsesBody
from inflight_gateway.sagemaker import invocations
from inflight_gateway.scores import score
from inflight_gateway.tokenizer_info import tokenizer_info
from inflight_gateway.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from inflight_gateway.tracing import Tracing

__all__ = ["build_app"]


@dataclass(frozen=True)
class _Endpoint:
    """A path, and the async function that answers it: one file for each.

    Attributes:
        body: type of the body, or several; empty for a request without one.
        error_form: of its errors; None: OpenAI's.
        verb: the method, if it is not GET without a body and POST with one.
    """

    path: str
    answer: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[Body] | tuple[type[Body], ...] = ()
    error_form: ErrorForm | None = None
    verb: str = ""

    @property
    def bodies(self) -> tuple[type[Body], ...]:
        return self.body if isinstance(self.body, tuple) else (self.body,)

    @property
    def method(self) -> str:
        return self.verb or ("POST" if self.body else "GET")


_ENDPOINTS = (
    _Endpoint("/v1/chat/completions", chat_completions, "Answer chats", ChatBody),
    _Endpoint("/v1/completions", completions, "Continue prompts", CompletionBody),
    _Endpoint("/v1/responses", responses, "Answer conversations, without keeping them", ResponsesBody),
    _Endpoint("/v1/responses/input_tokens", input_tokens, "Count the tokens of a conversation", InputTokensBody),
    _Endpoint("/v1/messages", messages, "Answer conversations of Anthropic's API", MessagesBody, anthropic_error),
    _Endpoint(
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a conversation of Anthropic's API",
        CountTokensBody,
        anthropic_error,
    ),
    _Endpoint("/v1/embeddings", embeddings, "The vectors of texts", EmbeddingBody),
    _Endpoint("/v1/score", score, "How well texts fit together", ScoreBody),
    _Endpoint("/score", score, "The same as /v1/score", ScoreBody),
    _Endpoint("/v1/rerank", rerank, "The order of documents by a query", RerankBody),
    _Endpoint("/v2/rerank", rerank, "The same as /v1/rerank", RerankBody),
    _Endpoint("/rerank", rerank, "The same as /v1/rerank", RerankBody),
    _Endpoint("/v1/classify", classify, "The classes of texts", ClassifyBody),
    _Endpoint("/classify", classify, "The same as /v1/classify", ClassifyBody),
    _Endpoint("/v1/models", list_models, "The models", error_form=models_error),
    _Endpoint("/v1/models/{model}", retrieve_model, "One model", error_form=models_error),
    _Endpoint("/v1/load_lora_adapter", load_lora_adapter, "Load a LoRA adapter, with the admin key", LoadAdapterBody),
    _Endpoint(
        "/v1/unload_lora_adapter", unload_lora_adapter, "Unload a LoRA adapter, with the admin key", UnloadAdapterBody
    ),
    _Endpoint("/tokenize", tokenize, "The token ids of a text or chat", TokenizeBody),
    _Endpoint("/detokenize", detokenize, "The text of token ids", DetokenizeBody),
    _Endpoint("/api/chat", ollama_chat, "Answer chats, in Ollama's form", OllamaChatBody, ollama_error),
    _Endpoint("/api/generate", ollama_generate, "Answer prompts, in Ollama's form", OllamaGenerateBody, ollama_error),
    _Endpoint("/api/embed", ollama_embed, "The vectors of texts, in Ollama's form", OllamaEmbedBody, ollama_error),
    _Endpoint(
        "/api/embeddings",
        ollama_embeddings,
        "The vector of a text, in Ollama's form",
        OllamaEmbeddingsBody,
        ollama_error,
    ),
    _Endpoint("/api/show", ollama_show, "One model, in Ollama's form", OllamaShowBody, ollama_error),
    _Endpoint("/api/tags", ollama_tags, "The models, in Ollama's form", error_form=ollama_error),
    _Endpoint("/api/ps", ollama_ps, "The models, all of them loaded, in Ollama's form", error_form=ollama_error),
    _Endpoint("/api/version", ollama_version, "The version of Ollama's API", error_form=ollama_error),
    _Endpoint("/", front_page, "A page for browsers, a line of text for other clients"),
    _Endpoint("/page/status", page_status, "The models and Tritons with their load, for the page"),
    _Endpoint("/tokenizer_info", tokenizer_info, "The settings of the tokenizer, with the chat template"),
    _Endpoint("/health", health, "Whether the gateway answers"),
    _Endpoint("/ready", ready, "Whether a model can serve"),
    _Endpoint("/health/ready", ready, "The same as /ready"),
    _Endpoint("/ping", ready, "The same as /ready, for SageMaker"),
    _Endpoint("/ping", ready, "The same as /ready, for SageMaker", verb="POST"),
    _Endpoint(
        "/invocations", invocations, "Answer chats and continue prompts, for SageMaker", (ChatBody, CompletionBody)
    ),
    _Endpoint("/load", load, "The number of requests that generate now"),
    _Endpoint("/version", version, "The version"),
    _Endpoint("/metrics", metrics, "Prometheus metrics"),
)

# Parts of OpenAI's API that this server does not have, by the first part of their path.
_ABSENT = frozenset(
    {
        *("assistants", "audio", "batches", "containers", "conversations", "evals", "files"),
        *("fine_tuning", "images", "moderations", "organization", "realtime", "skills", "threads"),
        *("uploads", "vector_stores", "videos"),
    }
)


def build_app(
    options: GatewayOptions, gateway: Gateway | None = None, on_stop: Callable[[], None] = lambda: None
) -> Starlette:
    """The ASGI application.

    Args:
        options: of the operator.
        gateway: replaces a new one, in tests.
        on_stop: called last, at shutdown.
    """
    shared = gateway or Gateway(options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Connections]]:
        yield {STATE: Connections(options.max_connections, options.header_timeout, options.send_timeout)}
        await shared.close()
        on_stop()

    app = Starlette(
        routes=_routes(),
        middleware=_middleware(options, shared),
        lifespan=lifespan,
        exception_handlers=dict(_HANDLERS),
    )
    app.state.gateway = shared
    return app


def _routes() -> list[Route]:
    # A model's name can contain slashes.
    routes = [
        Route(one.path.replace("{model}", "{model:path}"), one.answer, methods=[one.method]) for one in _ENDPOINTS
    ]
    pages = _pages()
    routes.append(Route("/api/{operation:path}", ollama_absent, methods=["GET", "HEAD", "POST", "DELETE"]))
    return [
        *routes,
        Route("/openapi.json", pages.document),
        Route("/docs", pages.page),
        Route("/page/{name}", page_file),
    ]


@functools.cache
def _pages() -> ApiPages:
    return ApiPages({(one.method, one.path): (one.summary, one.bodies) for one in _ENDPOINTS})


def _middleware(options: GatewayOptions, gateway: Gateway) -> list[Middleware]:
    """CORS is outside of `Front`: a browser must be able to read the refusal of a key, too."""
    paths = [one.path for one in _ENDPOINTS]
    outer = [Middleware(ResponseHeaders)]
    if gateway.provider is not None:
        outer.insert(0, Middleware(Tracing, provider=gateway.provider, paths=paths))
    front = Middleware(
        Front,
        keys=Keys(options.api_keys),
        hosts=AllowedHosts(options.allowed_hosts),
        metrics=gateway.metrics,
        paths=paths,
        open_paths=[*(("/load", "/metrics") if options.open_metrics else ()), *(OPEN_PATHS if options.page else ())],
        error_forms={one.path: one.error_form for one in _ENDPOINTS if one.error_form is not None},
    )
    direct = Middleware(DirectRoutes, {one.path: one.answer for one in _ENDPOINTS if one.body}, _HANDLERS)
    if not options.cors_origins:
        return [*outer, front, direct]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", WARNING, "retry-after"],
    )
    return [*outer, cors, front, direct]


async def _failed(http: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_response(error, http.scope)


async def _refused(http: Request, error: Exception) -> Response:
    """Starlette's own errors: an unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    path = http.url.path
    if error.status_code == 404 and path.removeprefix("/v1/").partition("/")[0] in _ABSENT:
        message = f"{path} is not supported: this server generates, embeds and ranks text; /docs lists what it has"
        return error_response(APIError(404, message, code="unsupported_endpoint"), http.scope)
    message = f"{http.method} {path}: {error.detail.lower()}; /docs lists what there is"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    shown = APIError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    return error_response(shown, http.scope)


async def _gone(http: Request, error: Exception) -> Response:
    http.scope["client_gone"] = True
    return Response(status_code=499)  # the client has disconnected


_HANDLERS = {APIError: _failed, HTTPException: _refused, ClientGone: _gone, ClientDisconnect: _gone}
