"""`python -m loadtest.soak`.  Exit status: 0 passed, 1 something was wrong, 2 wrong usage, 130 stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from inflight_tools.terminal import one_line_errors
from loadtest.soak.record import write
from loadtest.soak.run import Plan, soak

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(envvar="SOAK_MINUTES", min=0.1, help="Length of the load.")] = 20.0,
    turns: Annotated[
        int, typer.Option(min=0, help="So many events after the warm-up instead, one right after another.")
    ] = 0,
    kills: Annotated[bool, typer.Option("--kills/--no-kills", help="Kill engines, or only reload and unload.")] = True,
    spare: Annotated[bool, typer.Option("--spare/--no-spare", help="Whether the model keeps a spare process.")] = True,
    clients: Annotated[int, typer.Option(min=1, help="Requests that are open at a time.")] = Plan.clients,
    pause: Annotated[float, typer.Option(min=0.0, help="Seconds between two events.")] = Plan.pause,
    seed: Annotated[int, typer.Option(help="The same seed repeats requests and events.")] = Plan.seed,
    log_file: Annotated[Path | None, typer.Option(help="Keep the server's log in this file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a record of the run into this JSON file.")] = None,
) -> None:
    """Load one server with requests whose answers are known, kill its engine, reload and unload its model.

    Every request must end with the right answer, or with the error that it asked for; at the end the server
    must hold what it held after the warm-up.
    """
    # SIGTERM stops what was started, like Ctrl-C, also where a shell has made Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"no folder {output.parent}", param_hint="--output")
    plan = Plan(seconds=minutes * 60, turns=turns, kills=kills, spare=spare, clients=clients, pause=pause, seed=seed)
    with one_line_errors():
        verdict = soak(plan, log_file, typer.echo)
        if output is not None:
            write(output, plan, verdict)
    typer.echo("\n".join(verdict.lines()))
    raise typer.Exit(1 if verdict.num_problems else 0)


if __name__ == "__main__":
    app()
