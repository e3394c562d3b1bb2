"""`inflight generate`.  Exit status: 0 success, 1 the server refuses or fails, 2 no server or wrong usage."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, NoReturn

import typer

from inflight_client.client import Client
from inflight_client.endpoint import find_endpoints
from inflight_client.errors import InflightError, ServerUnreachableError

__all__ = ["generate"]

_INTERRUPTED = 130  # the status shells report for a program ended by Ctrl-C

_Prompt = Annotated[str, typer.Argument(help='Text to continue; "-" reads standard input.')]
_Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated, or at the end.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result with its timings as a JSON object.")]


def generate(
    prompt: _Prompt,
    url: Annotated[
        str | None,
        typer.Option(
            help="Triton's gRPC or HTTP address, or several with commas: the next continues a broken stream.",
            show_default="127.0.0.1:8001",
        ),
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="grpc or http.", show_default="the one that answers at --url")
    ] = None,
    model: Annotated[str, typer.Option(help="Model to ask.")] = "demo",
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of output tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens up to this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Make the output reproducible.")] = None,
    n: Annotated[int | None, typer.Option("-n", "--n", help="Number of sequences to sample.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user message.")] = False,
    stream: _Stream = True,
    json_: _Json = False,
    timeout: Annotated[float | None, typer.Option(help="Maximum seconds for the request.")] = None,
) -> None:
    """Generate text on a running server.  Ctrl-C cancels the request."""
    text = _standard_input() if prompt == "-" else prompt
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "n": n,
        "stop": stop or None,
        "timeout": timeout,
    }
    options = {name: value for name, value in options.items() if value is not None}
    options["one_response"] = not stream and not json_  # the timings in the JSON need a stream
    options |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    try:
        urls: str | list[str] | None = url
        if url is not None and protocol is None:
            protocol, urls = find_endpoints(url)
        with Client(urls, protocol=protocol or "grpc", model=model) as client:  # type: ignore[arg-type]
            _show(client, options, live=stream, as_json=json_)
    except ValueError as error:
        _fail(str(error), 2)
    except ServerUnreachableError as error:
        _fail(error.message, 2)
    except InflightError as error:
        _fail(error.message, 1)
    except BrokenPipeError:
        raise  # the reader of the output closed it
    except OSError as error:
        _fail(f"cannot write the output: {error.strerror}", 1)
    except KeyboardInterrupt:
        _fail("cancelled", _INTERRUPTED)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        _fail(f"standard input is not valid UTF-8: {error.reason} at {error.start}", 2)


def _show(client: Client, options: dict[str, Any], live: bool, as_json: bool) -> None:
    # The sequences of a request arrive interleaved, so only a single one can be shown live.
    live = live and not as_json and options.get("n", 1) == 1
    with client.stream(**options) as stream:
        try:
            for chunk in stream:
                if live:
                    typer.echo(chunk.text, nl=False)
        finally:
            if live:
                typer.echo()
    result = stream.result()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    elif not live:
        for choice in result.choices:
            typer.echo(choice.text)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"inflight: {message}", err=True)
    raise typer.Exit(status)
