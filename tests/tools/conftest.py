"""The commands of a program are built once for these tests: typer's runner builds all of them at each call."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing

_built = functools.cache(typer.main.get_command)


@pytest.fixture(scope="module", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """A runner that has the function under another name builds them at each call, as for other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", _built, raising=False)
        yield
