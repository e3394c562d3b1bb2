"""`inflight chat`.  Exit status: 0 the end of the conversation, 1 the server refuses or fails, 2 no server or wrong
usage."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from inflight_client.cli import (
    Adapter,
    MaxTokens,
    Model,
    OneSeed,
    Protocol,
    Stop,
    Temperature,
    Timeout,
    TopK,
    TopP,
    Url,
    given_options,
    one_line_errors,
    standard_input,
)
from inflight_client.client import Client
from inflight_client.command_client import client_for
from inflight_client.errors import InflightError, RequestCancelledError
from inflight_client.request import Message

__all__ = ["Conversation", "chat"]

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops an answer"
_MAX_TOKENS = 512


def chat(
    url: Url = None,
    protocol: Protocol = None,
    model: Model = None,
    adapter: Adapter = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: MaxTokens = _MAX_TOKENS,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: OneSeed = None,
    stop: Stop = None,
    timeout: Timeout = None,
) -> None:
    """Chat with a model of a running server.  Text on standard input is one message, and its answer the output.

    /reset forgets the conversation, /exit or Ctrl-D ends it, and Ctrl-C stops an answer.

    Examples: `inflight chat --system "Answer in one sentence."`, `echo "Who are you?" | inflight chat`.
    """
    options = given_options(
        adapter=adapter,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or None,
        timeout=timeout,
    )
    with one_line_errors(), client_for(url, protocol, model) as client:
        conversation = Conversation(client, system, options)
        if sys.stdin.isatty():
            typer.echo(f"{client.model}: {_COMMANDS}", err=True)
            _converse(conversation)
        else:
            conversation.ask(standard_input())


class Conversation:
    """Messages so far, and what to send with them."""

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self._messages = list(self._system)

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it comes; an answer that is stopped stays as far as it came.

        Raises:
            InflightError, ValueError: there is no answer; the message is forgotten.
            KeyboardInterrupt: the user stopped it.
        """
        asked: list[Message] = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        try:
            with self._client.stream(messages=asked, **self._options) as stream:
                for chunk in stream:
                    typer.echo(chunk.text, nl=False)
                    answer += chunk.text
        except (KeyboardInterrupt, RequestCancelledError):
            self._messages = [*asked, {"role": "assistant", "content": answer}]
            raise KeyboardInterrupt from None
        finally:
            typer.echo()
        self._messages = [*asked, {"role": "assistant", "content": answer}]


def _converse(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and editing
    while _takes_turn(conversation):
        pass


def _takes_turn(conversation: Conversation) -> bool:
    """Read a line and do what it says; False: the end."""
    try:
        text = input("> ").strip()
        if text == "/exit":
            return False
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            typer.echo(f"{text.split()[0]}: no such command; {_COMMANDS}", err=True)
        elif text:
            conversation.ask(text)
    except EOFError:
        typer.echo()
        return False
    except KeyboardInterrupt:
        typer.echo()
    except (InflightError, ValueError) as error:
        typer.echo(f"inflight: {error}", err=True)
    return True
