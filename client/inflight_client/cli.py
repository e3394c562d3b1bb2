"""`inflight generate`.  Exit status: 0 success, 1 the server refuses or fails, 2 no server or wrong usage."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from inflight_client.client import Client
from inflight_client.command_client import INTERRUPTED, client_for, fail
from inflight_client.errors import InflightError, ServerUnreachableError

__all__ = [
    "Adapter", "MaxTokens", "Model", "OneSeed", "Protocol", "Stop", "Temperature", "Timeout", "TopK", "TopP", "Url",
    "generate", "given_options", "one_line_errors", "standard_input",
]  # fmt: skip

Url = Annotated[
    str | None,
    typer.Option(
        help="Triton's gRPC or HTTP address, or several with commas: the next continues a broken stream.",
        show_default="127.0.0.1:8001",
    ),
]
Protocol = Annotated[str | None, typer.Option(help="grpc or http.", show_default="the one that answers at --url")]
Model = Annotated[str | None, typer.Option(help="Model to ask.", show_default="the only one of the server")]
MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of output tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens up to this probability.")]
OneSeed = Annotated[int | None, typer.Option("--seed", help="Make the output reproducible.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the output; repeatable.")]
Adapter = Annotated[str | None, typer.Option(help="LoRA adapter of the model to use.")]
Timeout = Annotated[float | None, typer.Option(help="Maximum seconds for the request.")]
_Prompt = Annotated[str, typer.Argument(help='Text to continue; "-" reads standard input.')]
_Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated, or at the end.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result with its timings as a JSON object.")]


def generate(
    prompt: _Prompt,
    url: Url = None,
    protocol: Protocol = None,
    model: Model = None,
    adapter: Adapter = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: OneSeed = None,
    n: Annotated[int | None, typer.Option("-n", "--n", help="Number of sequences to sample.")] = None,
    stop: Stop = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user message.")] = False,
    stream: _Stream = True,
    json_: _Json = False,
    timeout: Timeout = None,
) -> None:
    """Generate text on a running server.  Ctrl-C cancels the request.

    Examples: `inflight generate "Once upon a time" --max-tokens 40`, `cat letter.txt | inflight generate - --chat`.
    """
    text = standard_input() if prompt == "-" else prompt
    options = given_options(
        adapter=adapter,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n=n,
        stop=stop or None,
        timeout=timeout,
    )
    options["one_response"] = not stream and not json_  # the timings in the JSON need a stream
    options |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with one_line_errors(), client_for(url, protocol, model) as client:
        _show(client, options, live=stream, as_json=json_)


def given_options(**options: Any) -> dict[str, Any]:
    """The options that were given, without the others."""
    return {name: value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what goes wrong with a request into one line and an exit status."""
    try:
        yield
    except ValueError as error:
        fail(str(error), 2)
    except ServerUnreachableError as error:
        fail(error.message, 2)
    except InflightError as error:
        fail(error.message, 1)
    except BrokenPipeError:
        raise  # the reader of the output closed it
    except OSError as error:
        fail(f"cannot write the output: {error.strerror}", 1)
    except KeyboardInterrupt:
        fail("cancelled", INTERRUPTED)


def standard_input() -> str:
    """All of it; exits if it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        fail(f"standard input is not valid UTF-8: {error.reason} at {error.start}", 2)


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
