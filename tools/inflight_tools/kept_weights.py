"""`inflight weights`: what engines on this machine have kept for their next start.

Exit status: 0 success, 1 a file is damaged or cannot be dropped, 2 wrong usage.
"""

from __future__ import annotations

import os
import time
from enum import Enum
from typing import Annotated

import typer

from inflight.loading.load_errors import CannotKeep
from inflight.loading.saved.cache_folder import CacheFolder, cache_folder
from inflight.loading.saved.mapped_file import Damaged, MappedFile, read_header
from inflight_tools.terminal import fail

__all__ = ["weights"]


class _Action(str, Enum):
    list = "list"
    verify = "verify"
    drop = "drop"


def weights(
    action: Annotated[_Action, typer.Argument(help="What to do.")] = _Action.list,
    keys: Annotated[list[str] | None, typer.Argument(help="Beginnings of names, as listed; none: all files.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="With drop: all files.")] = False,
) -> None:
    """List, verify or drop weights that engines have kept.  Engines of this user keep them for their next start.

    The folder is $INFLIGHT_CACHE, else ~/.cache/inflight.  An engine that has mapped a dropped file goes on.

    Examples: `inflight weights`, `inflight weights verify`, `inflight weights drop 9d6241`.
    """
    try:
        cache = cache_folder()
    except CannotKeep as error:
        fail(str(error), 2)
    if cache is None:
        fail("INFLIGHT_CACHE is off: nothing is kept", 2)
    if action is _Action.drop and not keys and not all_:
        fail("name what to drop, or add --all", 2)
    names = [path.name for path in cache.files() if not keys or path.name.startswith(tuple(keys))]
    if keys and not names:
        fail(f"{cache.path} has no file whose name begins with {', '.join(keys)}", 2)
    failed = False
    for name in names:
        line = _dropped(cache, name) if action is _Action.drop else _line(cache, name, action is _Action.verify)
        if line is not None:
            failed = failed or line.startswith(("damaged", "cannot"))
            typer.echo(line)
    if failed:
        raise typer.Exit(1)


def _dropped(cache: CacheFolder, name: str) -> str:
    try:
        (cache.path / name).unlink(missing_ok=True)
    except OSError as error:
        return f"cannot drop {name}: {error.strerror}"
    return f"dropped {name}"


def _line(cache: CacheFolder, name: str, verify: bool) -> str | None:
    """About a file; None if it has gone."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME
    try:
        with open(cache.path / name, "rb", opener=lambda path, _: os.open(path, flags)) as file:  # not a use of it
            found = os.fstat(file.fileno())
            key = name.removesuffix(".iw")
            header = MappedFile(file.fileno(), key).header if verify else read_header(file.fileno(), key)
    except FileNotFoundError:
        return None
    except Damaged as error:
        return f"damaged  {name}: {error}"
    except OSError as error:  # a link, a folder, a pipe, or a disk that fails
        return f"damaged  {name}: {error.strerror}"
    content = header.content
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.st_atime))
    size = f"{header.layout.size / 2**20:.0f} MiB"
    state = "whole  " if verify else "       "
    return f"{state}  {name}  {size:>9}  used {used}  {content['dtype']}  {content['model']}"
