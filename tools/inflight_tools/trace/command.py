"""`inflight trace`.  Exit status: 0 success, 1 the server has no trace, 2 no server or wrong usage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from inflight.engine.step_trace import TraceError
from inflight_tools.admin import ENVIRONMENT
from inflight_tools.trace.files import FORMATS, TraceServerError, fetch_trace, format_of, read_trace, render

__all__ = ["trace"]


def trace(
    output: Annotated[
        list[Path], typer.Option("--output", "-o", help="File to write: .html, .perfetto.json or .json; repeatable.")
    ],
    url: Annotated[str, typer.Option(help="Triton's gRPC or HTTP address.")] = "127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to ask; its model.json must set step_trace.", show_default="the only one of the server"
        ),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="html, perfetto or json; by default from the name.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Keep only this many of the last steps.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Keep only the last seconds of the trace.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar=ENVIRONMENT, help="What the server printed at its start.")
    ] = None,
    input_: Annotated[Path | None, typer.Option("--input", help="Convert this .json file instead of asking.")] = None,
) -> None:
    """Export what the engine did last.  A timeline (HTML), a file for ui.perfetto.dev, or raw JSON.

    Examples: `inflight trace -o steps.html`, `inflight trace -o steps.json --last 100`.
    """
    try:
        formats = [_checked(format_) if format_ else format_of(path) for path in output]
        found = read_trace(input_) if input_ else fetch_trace(url, model, admin_key=admin_key)
        if last is not None:
            found = found.last(last)
        if seconds is not None and found.steps:
            since = found.steps[-1].end - seconds
            found = found.last(sum(step.end >= since for step in found.steps))
        if not found.steps:
            _fail("the engine has not run a step yet; send requests first", 1)
        for path, name in zip(output, formats):
            path.write_bytes(render(found, name, title=None if input_ else model))
            typer.echo(f"wrote {path}: {len(found.steps)} steps, {len(found.requests)} requests")
    except TraceServerError as error:
        _fail(str(error), error.status)
    except (TraceError, ValueError, OSError) as error:
        _fail(str(error), 2)


def _checked(format_: str) -> str:
    if format_ not in FORMATS:
        raise ValueError(f"--format {format_!r}: must be one of {', '.join(FORMATS)}")
    return format_


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"inflight: {message}", err=True)
    raise typer.Exit(status)
