"""`inflight gateway`: OpenAI's API in front of Triton servers that run already."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_tools import admin
from inflight_tools.ports import check_port, pick_ports
from inflight_tools.terminal import fail, one_line_errors, stop_signals

if TYPE_CHECKING:
    from inflight_gateway.options import GatewayOptions

__all__ = [
    "AllowedHosts",
    "AllowedOrigin",
    "ApiKey",
    "ApiKeyFile",
    "NoPage",
    "OtlpTracesEndpoint",
    "Strict",
    "TrustRequestChatTemplate",
    "gateway",
    "gateway_options",
    "read_keys",
]

ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        envvar="INFLIGHT_API_KEY", help="A key that clients must send; repeatable.  By default none is asked for."
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="A file with one key a line; empty lines and lines that start with # do not count.")
]
AllowedOrigin = Annotated[
    list[str] | None, typer.Option(help="Origin whose pages can call from a browser (CORS); repeatable; * for all.")
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="Name by which clients can call, beside IP addresses and local names; repeatable; * for any.  By default "
        "any, or only local names without keys on a loopback address."
    ),
]
TrustRequestChatTemplate = Annotated[
    bool,
    typer.Option(
        "--trust-request-chat-template",
        help="Take chat templates from requests, which are programs; with `trust_request_chat_template` of the model.",
    ),
]
OtlpTracesEndpoint = Annotated[
    str,
    typer.Option(metavar="URL", help="Collector that gets spans as OTLP over HTTP, such as http://127.0.0.1:4318."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse requests with unknown keys: 400 instead of a warning.")]
NoPage = Annotated[bool, typer.Option("--no-page", help="Serve no page for browsers at /, only the API.")]


def gateway(
    triton: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL=]HOST:PORT",
            help="gRPC address of a Triton; repeatable, the preferred one first.  MODEL=: for this model alone.",
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="Which Triton gets a request: 'ordered' (the first that did not fail lately), 'round-robin', "
            "'least-loaded', or 'prefix' (the one that has the prompt's beginning in its cache)."
        ),
    ] = "ordered",
    routing_prefix_tokens: Annotated[
        int, typer.Option(min=1, help="With --routing prefix: tokens of a prompt that count, of 4 characters each.")
    ] = 256,
    routing_load_factor: Annotated[
        float, typer.Option(help="With --routing prefix: a Triton with this multiple of the mean load is passed over.")
    ] = 1.25,
    prefill_triton: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="gRPC address of a Triton that computes long prompts, whose answers --triton generates; repeatable.",
        ),
    ] = None,
    handover: Annotated[
        str,
        typer.Option(
            metavar="auto|TOKENS|off",
            help="With --prefill-triton: which prompts it gets; 'auto' (the default) compares measured costs, a number "
            "sends prompts with more uncached tokens than that.",
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 9000,
    workers: Annotated[int, typer.Option(min=1, help="Processes; each uses at most one core.")] = 1,
    model: Annotated[
        list[str] | None, typer.Option(help="A model to list; repeatable.  By default all that take text.")
    ] = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    tool_call_parser: Annotated[
        str, typer.Option(help="Format of tool calls in the model's text; by default told by the chat template.")
    ] = "",
    reasoning_parser: Annotated[
        str, typer.Option(help="Format of reasoning in the model's text; by default told by the chat template.")
    ] = "",
    allowed_origin: AllowedOrigin = None,
    allowed_hosts: AllowedHosts = None,
    tenant_header: Annotated[
        str, typer.Option(help="HTTP header that names the tenant, before the body's `user`.")
    ] = "",
    request_timeout: Annotated[float, typer.Option(help="Time limit of a request in seconds; 0 for none.")] = 600.0,
    reconnect_timeout: Annotated[
        float, typer.Option(help="Seconds that requests and streams wait for a Triton that cannot be reached; 0: none.")
    ] = 60.0,
    max_open_requests: Annotated[int, typer.Option(min=1, help="Requests at the same time, per process.")] = 1024,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at the same time, per process.")] = 4096,
    header_timeout: Annotated[float, typer.Option(help="Seconds for the head of a request to arrive.")] = 20.0,
    send_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a client that takes nothing of what waits beyond the kernel's buffers is cut off."
        ),
    ] = 60.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Size of a request body.")] = 16 * 1024 * 1024,
    max_bodies_bytes: Annotated[
        int, typer.Option(min=1, help="Size of all bodies that arrive at the same time, per process.")
    ] = 128 * 1024 * 1024,
    strict: Strict = False,
    trust_request_chat_template: TrustRequestChatTemplate = False,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key for HTTPS, PEM.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate chain for HTTPS, PEM.")] = None,
    triton_metrics: Annotated[
        str, typer.Option(metavar="URL", help="Triton's metrics, which /metrics shows beside the gateway's own.")
    ] = "",
    otlp_traces_endpoint: OtlpTracesEndpoint = "",
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Ask for no key at /metrics and /load.")] = False,
    enable_tokenizer_info_endpoint: Annotated[
        bool, typer.Option("--enable-tokenizer-info-endpoint", help="Answer /tokenizer_info, with the chat template.")
    ] = False,
    fim_template: Annotated[
        str,
        typer.Option(
            help="Prompt of completions with `suffix`, such as '<PRE>{prefix}<SUF>{suffix}<MID>'; by default told by "
            "the tokenizer; 'none' refuses them."
        ),
    ] = "",
    no_page: NoPage = False,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log a line for each request.")] = False,
    exit_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that open requests have to finish on SIGTERM; streams can need more.")
    ] = 10,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar=admin.ENVIRONMENT,
            help="Triton's admin key: without it a restricted server lists no models, and the page shows no load.",
        ),
    ] = None,
) -> None:
    """Serve OpenAI's API in front of one Triton or several.  These serve the same models, or each model has its own.

    Examples: `inflight gateway --triton 127.0.0.1:8001`, `inflight gateway --triton a:8001 --triton b:8001 --routing
    prefix --host 0.0.0.0 --api-key-file keys`.

    Exit status: 0 stopped by Ctrl-C or SIGTERM, 1 the port cannot be used, 2 wrong usage.
    """
    options = gateway_options(
        triton=tuple(triton or ["127.0.0.1:8001"]),
        routing=routing,
        routing_prefix_tokens=routing_prefix_tokens,
        routing_load_factor=routing_load_factor,
        prefill_triton=tuple(prefill_triton or ()),
        handover=handover,
        models=tuple(model or ()),
        headers=admin.grpc_metadata(admin_key),
        api_keys=read_keys(api_key, api_key_file),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        cors_origins=tuple(allowed_origin or ()),
        allowed_hosts=tuple(allowed_hosts or ()),
        tenant_header=tenant_header,
        request_timeout=request_timeout or None,
        reconnect_timeout=reconnect_timeout,
        max_open_requests=max_open_requests,
        max_connections=max_connections,
        header_timeout=header_timeout,
        send_timeout=send_timeout,
        max_body_bytes=max_body_bytes,
        max_bodies_bytes=max_bodies_bytes,
        strict=strict,
        trust_request_chat_template=trust_request_chat_template,
        triton_metrics=triton_metrics,
        otlp_traces_endpoint=otlp_traces_endpoint,
        open_metrics=open_metrics,
        enable_tokenizer_info_endpoint=enable_tokenizer_info_endpoint,
        fim_template=fim_template,
        page=not no_page,
        admin_key=admin_key or "",
    )
    from inflight_gateway.server import ServerOptions, run

    try:
        server = ServerOptions(
            host=host,
            port=port,
            workers=workers,
            ssl_keyfile=None if ssl_keyfile is None else str(ssl_keyfile),
            ssl_certfile=None if ssl_certfile is None else str(ssl_certfile),
            access_log=access_log,
            exit_timeout=exit_timeout,
        )
    except ValueError as error:
        fail(str(error), status=2)
    scheme = "https" if ssl_keyfile else "http"
    with stop_signals(), one_line_errors():
        chosen = _listening_port(host, port)
        where = f"{scheme}://{host}:{chosen}/v1"
        page = f" and a page for browsers at {scheme}://{host}:{chosen}/" if options.page else ""
        typer.echo(f"OpenAI's API at {where}{page}, in front of {', '.join(options.triton)}; Ctrl-C stops it")
        run(options, dataclasses.replace(server, port=chosen))


def _listening_port(host: str, port: int) -> int:
    """The port, or a free one for 0; raises LauncherError if it cannot be used."""
    (free,) = pick_ports(1, host)
    if port == 0:
        return free
    check_port(host, port, "OpenAI", "--port")
    return port


def gateway_options(**values: Any) -> GatewayOptions:
    """Checked options; exits if one is wrong, or if a package that the gateway needs is missing."""
    try:
        import inflight_gateway.server  # noqa: F401
        from inflight_gateway.options import GatewayOptions

        return GatewayOptions(**values)
    except ModuleNotFoundError as error:
        fail(f"{error.name} not found; the gateway needs it: pip install 'triton-inflight[gateway]'")
    except ValueError as error:
        fail(str(error), status=2)


def read_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """The API keys of the command line and of a file; exits if the file cannot be read or has none."""
    keys = list(given or ())
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            fail(f"--api-key-file: {error}", status=2)
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            fail(f"--api-key-file: {file} has no keys; put one on each line", status=2)
        keys += found
    return tuple(keys)
