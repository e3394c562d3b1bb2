"""`inflight quantize`: a checkpoint in four bits.

Exit status: 0 success, 1 a failure or a signal stopped it, 2 wrong usage.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_tools.quantize.progress import Shown
from inflight_tools.quantize.refused import Refused
from inflight_tools.terminal import fail, like_ctrl_c

if TYPE_CHECKING:
    from inflight_tools.quantize.run import Done

__all__ = ["quantize"]


_GROUPS, _HEAD_BITS = (32, 64, 128), (4, 8, 16)


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or a hub id in the cache.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; it must not exist.")],
    group_size: Annotated[int, typer.Option(help="Inputs with a common scale: 32, 64 or 128.")] = 32,
    head_bits: Annotated[
        int, typer.Option(help="Bits of the head: 4, 8, or 16, which leaves it as it is, as every server can read it.")
    ] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Texts that the model writes.")] = 8,
    sample_tokens: Annotated[int, typer.Option(min=32, help="Length of each, tokens.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling of these texts.")] = 0,
    text: Annotated[Path | None, typer.Option(help="Take the texts from this file instead.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Write a checkpoint in four bits, by GPTQ.  The model itself writes the text for it: no data are needed.

    The result is in compressed-tensors' format `pack-quantized`, which transformers and other servers read, too.

    A run that was stopped, by whatever, leaves OUTPUT.partial; the same command goes on after the last whole layer.

    Examples: `inflight quantize ./checkpoint --output ./checkpoint-int4`, then `inflight serve ./checkpoint-int4`.
    """
    for name, value, allowed in (("group-size", group_size, _GROUPS), ("head-bits", head_bits, _HEAD_BITS)):
        if value not in allowed:
            fail(f"--{name} {value}: give {allowed[0]}, {allowed[1]} or {allowed[2]}", status=2)
    if not output.name:
        fail(f"--output {output} exists: name a folder to make", status=2)
    try:
        from inflight_tools.quantize.decoder_walk import Scheme
        from inflight_tools.quantize.run import write_quantized
        from inflight_tools.quantize.samples import Wanted
    except ModuleNotFoundError as error:
        fail(f"{error.name} not found; it is needed to quantize: pip install 'triton-inflight[backend]'")
    logging.basicConfig(level=logging.ERROR)
    begun = time.monotonic()
    shown = Shown(not json_)
    partial = output.with_name(f"{output.name}.partial")
    try:
        with like_ctrl_c():
            scheme = Scheme(group_size, head_bits)
            done = write_quantized(model, output, scheme, Wanted(samples, sample_tokens, seed, text), shown)
    except Refused as error:
        shown.end()
        fail(str(error))
    except OSError as error:
        shown.end()
        fail(f"{error.filename or partial}: {error.strerror or error}{_again(partial)}")
    except KeyboardInterrupt:
        shown.end()
        fail(f"stopped{_again(partial)}")
    shown.end()
    seconds = time.monotonic() - begun
    typer.echo(json.dumps(_as_json(done, output, seconds)) if json_ else _as_text(done, output, seconds))


def _again(partial: Path) -> str:
    return f"; the same command goes on with {partial}" if partial.is_dir() else ""


def _as_json(done: Done, output: Path, seconds: float) -> dict[str, Any]:
    return {
        "output": str(output),
        "bytes": done.num_bytes,
        "tokens": done.num_tokens,
        "seconds": round(seconds, 1),
        "relative_errors": {name: round(error, 5) for name, error in done.errors.items()},
        "not_quantized": done.ignored,
    }


def _as_text(done: Done, output: Path, seconds: float) -> str:
    mean = sum(done.errors.values()) / max(1, len(done.errors))
    lines = [
        f"wrote {output}: {done.num_bytes / 2**20:.0f} MiB, {len(done.errors)} layers quantized on {done.num_tokens} "
        f"tokens in {seconds:.0f} s; their outputs differ by {mean:.1%} on average"
    ]
    if done.ignored:
        lines.append(f"left as they are, since the group does not divide their inputs: {', '.join(done.ignored)}")
    return "\n".join([*lines, f"serve it: inflight serve {output}"])
