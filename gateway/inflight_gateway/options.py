"""The operator's options of a gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight_gateway.affinity import BoundedRing
from inflight_gateway.fill_in_middle import check_fim_template
from inflight_gateway.hosts import check_allowed_hosts
from inflight_gateway.reasoning_formats import check_reasoning_parser
from inflight_gateway.routing import POLICIES, Policy
from inflight_gateway.tool_parsers import format_named
from inflight_gateway.tracing import check_endpoint

__all__ = ["GatewayOptions"]


@dataclass(frozen=True)
class GatewayOptions:
    """Options of one gateway process.

    Attributes:
        triton: gRPC addresses `host:port`, the preferred one first.  They serve the same checkpoints.
            `MODEL=host:port` serves this model alone, and no other Triton gets its requests.
        routing: chooses one of them for a request: the first that has not failed recently ("ordered"), each in turn
            ("round-robin"), the one with the fewest requests ("least-loaded"), or the one that has the prompt's prefix
            ("prefix").
        routing_prefix_tokens: tokens of a prompt that "prefix" uses; four characters of text count as a token.
        routing_load_factor: "prefix" skips a Triton with this multiple of the mean load.
        prefill_triton: gRPC addresses of Tritons that compute long prompts, and leave the answers to those of `triton`.
        handover: the prompts for them: those of more than so many tokens that are not cached yet, "auto" (the ones that
            `handover_policy` expects to pay), or "off"; "": "auto" if there are such Tritons.
        models: names to list; empty: all text models in Triton's repository index.  Requests can name others.
        headers: sent with every call to Triton, such as the key of its management endpoints.
        api_keys: requests must send one of them as `Authorization: Bearer KEY`; empty: no key is needed.
        cors_origins: origins of pages that can call the gateway from a browser; "*": all; empty: none.
        allowed_hosts: names by which clients can call the gateway, beside IP addresses and local names; empty: any (but
            `server.run` allows only those for a gateway without keys that listens on a loopback address).
        tenant_header: HTTP header that names the tenant, before the body's `user`; "" for none.
        max_body_bytes: of a request body.
        max_bodies_bytes: of all request bodies that arrive at the same time, per process; more are refused with 503.
        body_timeout: maximum seconds for a request body to arrive.
        max_body_depth: nesting of JSON in a request body.
        max_body_items: values in a request body, all levels together; an object or a list counts as ten.
        max_prompts: prompts of one completion request.
        max_inputs: texts, or pairs of them, of one request for embeddings, scores, an order or classes.
        reconnect_timeout: maximum seconds that a request, or an open stream, waits for a Triton that cannot be reached;
            0: it does not wait.
        max_n: choices of one prompt.
        max_open_requests: maximum number of generating requests per process, more are refused with 429; and of
            requests waiting for the same Tritons to answer about their model, more are refused with 503.
        max_connections: maximum number of connections per process; a new one closes the one that has waited longest
            without a request, or is refused with 503 if all have requests.
        header_timeout: maximum seconds for the head of a request to arrive.
        send_timeout: seconds after which a client that takes nothing of what the kernel's buffers do not hold loses its
            connection.
        request_timeout: maximum seconds for a request; None: no limit.
        keep_alive_seconds: seconds without an event after which a stream sends a comment.
        strict: refuse unknown keys in request bodies instead of ignoring them with a warning.
        tool_call_parser: format of tool calls in the model's text; "": detected from the chat template.
        reasoning_parser: format of reasoning in the model's text; "": detected from the chat template.
        trust_request_chat_template: requests can have a `chat_template`, which is a program; the model's operator must
            allow it, too.
        triton_metrics: URL of Triton's metrics, which `/metrics` adds to the gateway's own: endpoint pickers read a
            replica's load on the port that they send requests to.  "": none.
        enable_tokenizer_info_endpoint: answer `/tokenizer_info`, which shows the chat template.
        fim_template: prompt of completions with `suffix`, with the places `{prefix}` and `{suffix}`; "": told by the
            model's tokenizer; "none": `suffix` is refused.
        open_metrics: answer `/metrics` and `/load` without a key.
        page: serve a page to browsers at `/`, for chats and the state of the models, and one with the endpoints at
            `/docs`.
        admin_key: of the Tritons; the page shows the load of the models only with it.  "": they have none.
        otlp_traces_endpoint: URL of a collector that takes OTLP over HTTP: each request becomes a span; "": none.
        system_fingerprint: overrides the default, which names checkpoint and version.
    """

    triton: tuple[str, ...] = ("127.0.0.1:8001",)
    routing: Policy = "ordered"
    routing_prefix_tokens: int = 256
    routing_load_factor: float = 1.25
    prefill_triton: tuple[str, ...] = ()
    handover: str = ""
    models: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tenant_header: str = ""
    max_body_bytes: int = 16 * 1024 * 1024
    max_bodies_bytes: int = 128 * 1024 * 1024
    body_timeout: float = 60.0
    max_body_depth: int = 64
    max_body_items: int = 1_000_000
    max_prompts: int = 128
    max_inputs: int = 2048
    max_n: int = 128
    max_open_requests: int = 1024
    max_connections: int = 4096
    header_timeout: float = 20.0
    send_timeout: float = 60.0
    reconnect_timeout: float = 60.0
    request_timeout: float | None = 600.0
    keep_alive_seconds: float = 15.0
    strict: bool = False
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    triton_metrics: str = ""
    trust_request_chat_template: bool = False
    enable_tokenizer_info_endpoint: bool = False
    fim_template: str = ""
    open_metrics: bool = False
    page: bool = True
    admin_key: str = ""
    otlp_traces_endpoint: str = ""
    system_fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.otlp_traces_endpoint:
            check_endpoint(self.otlp_traces_endpoint)
        if self.tool_call_parser:
            format_named(self.tool_call_parser)
        check_reasoning_parser(self.reasoning_parser)
        check_allowed_hosts(self.allowed_hosts)
        check_fim_template(self.fim_template)
        if not self.triton:
            raise ValueError("triton: at least one address host:port is expected")
        named = set(self.triton_groups)  # checks them
        if "" not in named and not named.issuperset(self.models):
            raise ValueError(
                f"models={self.models!r}: {sorted(set(self.models) - named)} have no Triton in {self.triton!r}"
            )
        if self.routing not in POLICIES:
            raise ValueError(f"routing={self.routing!r}: must be one of {', '.join(POLICIES)}")
        if self.routing != "ordered":
            for addresses in self.triton_groups.values():
                BoundedRing(addresses, self.routing_load_factor)
        self._check_handover()
        for key in self.api_keys:
            if not (key.isascii() and key.isprintable() and key and " " not in key):
                raise ValueError("api_keys: a key must consist of printable ASCII characters without spaces")
        sizes = ("max_body_bytes", "max_bodies_bytes", "max_body_depth", "max_body_items")
        positive = (*sizes, "max_prompts", "max_inputs", "max_n", "max_open_requests", "max_connections")
        for name in (*positive, "routing_prefix_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("request_timeout", "header_timeout", "send_timeout", "body_timeout", "keep_alive_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be above 0 seconds")
        if not self.reconnect_timeout >= 0:
            raise ValueError(f"reconnect_timeout={self.reconnect_timeout}: must be at least 0 seconds")
        if self.triton_metrics and not self.triton_metrics.startswith(("http://", "https://")):
            raise ValueError(
                f"triton_metrics={self.triton_metrics!r}: expected a URL such as http://127.0.0.1:8002/metrics"
            )

    def _check_handover(self) -> None:
        if not re.fullmatch(r"|auto|off|\d{1,9}", self.handover, re.ASCII):
            raise ValueError(f"handover={self.handover!r}: must be a number of tokens, auto or off")
        if self.handover not in ("", "off") and not self.prefill_triton:
            raise ValueError(f"handover={self.handover!r}: name a Triton for prompts, too (prefill_triton), or set off")
        decoding = {address for addresses in self.triton_groups.values() for address in addresses}
        for place, address in enumerate(self.prefill_triton):
            if not address or "=" in address or address in self.prefill_triton[:place]:
                raise ValueError(f"prefill_triton={address!r}: expected HOST:PORT, each once")
            if address in decoding:
                raise ValueError(f"prefill_triton={address!r}: is in triton, too; a Triton computes prompts or answers")

    @property
    def triton_groups(self) -> dict[str, tuple[str, ...]]:
        """The addresses of `triton` by model; "": of Tritons without one.

        Raises:
            ValueError: an empty model or address.
        """
        groups: dict[str, list[str]] = {}
        for given in self.triton:
            model, separator, address = given.rpartition("=")
            if not address or (separator and not model):
                raise ValueError(f"triton={given!r}: expected HOST:PORT, or MODEL=HOST:PORT")
            groups.setdefault(model, []).append(address)
        return {model: tuple(addresses) for model, addresses in groups.items()}
