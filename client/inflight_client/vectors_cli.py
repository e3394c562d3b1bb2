"""`inflight embed` and `inflight rerank`.  Exit status: as of `inflight generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight_client.cli import Adapter, Model, Protocol, Timeout, Url, given_options, one_line_errors, standard_input
from inflight_client.command_client import client_for, fail

__all__ = ["embed", "rerank"]

_AT_ONCE = 256  # texts of a request

_Texts = Annotated[list[str] | None, typer.Argument(help='Texts; "-" reads one a line from standard input.')]
_File = Annotated[Path | None, typer.Option(help="Read texts from this file, too, one a line.")]
_Instruction = Annotated[
    str | None, typer.Option(help="What the texts are for, or the name of a prompt of the checkpoint.")
]
_Truncate = Annotated[
    int | None, typer.Option(help="Keep at most this many tokens of each text; -1: as many as the model takes.")
]


def embed(
    texts: _Texts = None,
    file: _File = None,
    url: Url = None,
    protocol: Protocol = None,
    model: Model = None,
    adapter: Adapter = None,
    dimensions: Annotated[int | None, typer.Option(help="Size of a vector, if the model allows several.")] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Vectors of length 1.", show_default="as the checkpoint does"),
    ] = None,
    instruction: _Instruction = None,
    truncate_prompt_tokens: _Truncate = None,
    timeout: Timeout = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print each text with its vector and number of tokens as a JSON object.")
    ] = False,
) -> None:
    """Print the vectors of texts, one a line.  They have the order of the texts.

    Examples: `inflight embed "a cat" "a dog"`, `inflight embed --file texts.txt --json`.
    """
    given = _given(texts, file, "text")
    options: dict[str, Any] = given_options(
        adapter=adapter,
        dimensions=dimensions,
        normalize=normalize,
        instruction=instruction,
        truncate_prompt_tokens=truncate_prompt_tokens,
        timeout=timeout,
    )
    with one_line_errors(), client_for(url, protocol, model) as client:
        for start in range(0, len(given), _AT_ONCE):
            some = given[start : start + _AT_ONCE]
            found = client.embed(some, **options)
            for text, vector, tokens in zip(some, found.vectors.tolist(), found.token_counts.tolist()):
                row = {"text": text, "embedding": vector, "tokens": tokens}
                numbers = " ".join(f"{number:.8g}" for number in vector)
                typer.echo(json.dumps(row, ensure_ascii=False) if json_ else numbers)


def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are to fit.")],
    documents: _Texts = None,
    file: _File = None,
    url: Url = None,
    protocol: Protocol = None,
    model: Model = None,
    adapter: Adapter = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Print this many documents.", show_default="all")] = None,
    instruction: _Instruction = None,
    truncate_prompt_tokens: _Truncate = None,
    timeout: Timeout = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print each document with its place and score as a JSON object.")
    ] = False,
) -> None:
    """Print documents, the best match of a query first.  Each has its score before it.

    Examples: `inflight rerank "How large is a cat?" "It rains." "A cat weighs 4 kg."`, `cat lines.txt | inflight rerank
    "cats" - --top-n 3`.
    """
    given = _given(documents, file, "document")
    options: dict[str, Any] = given_options(
        adapter=adapter,
        top_n=top_n,
        instruction=instruction,
        truncate_prompt_tokens=truncate_prompt_tokens,
        timeout=timeout,
    )
    with one_line_errors(), client_for(url, protocol, model) as client:
        for one in client.rerank(query, given, **options):
            row = {"index": one.index, "score": one.score, "document": one.document}
            typer.echo(json.dumps(row, ensure_ascii=False) if json_ else f"{one.score:.6f}\t{one.document}")


def _given(arguments: list[str] | None, file: Path | None, what: str) -> list[str]:
    """The texts of the command line, of standard input and of the file; exits if there is none."""
    texts: list[str] = []
    for argument in arguments or []:
        texts += _lines(standard_input()) if argument == "-" else [argument]
    if file is not None:
        try:
            texts += _lines(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read {file}: {error}", 2)
    if not texts:
        fail(f'give at least one {what}, "-" for standard input, or --file', 2)
    return texts


def _lines(text: str) -> list[str]:
    """The lines that are not empty; only a line feed ends one."""
    return [line for line in (line.rstrip("\r") for line in text.split("\n")) if line]
