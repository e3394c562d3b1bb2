"""The commands of a program are built once for these tests: typer's runner builds all of them at each call."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing


@pytest.fixture(scope="package", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """A runner that finds the function under another name builds them at each call, as before."""
    with pytest.MonkeyPatch.context() as patch:
        build = functools.cache(typer.main.get_command)
        patch.setattr(typer.testing, "_get_command", build, raising=False)
        yield
