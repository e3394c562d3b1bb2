"""The commands of a program are built once: typer's runner builds all of them at each call."""

from __future__ import annotations

import functools

import typer.testing

typer.testing._get_command = functools.cache(typer.testing._get_command)
