"""A model whose engine is the fake one."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_engine
from frontend_rig import CHECKPOINT

FAKE_CONFIG = 'backend: "inflight"\ninstance_group [ { kind: KIND_CPU } ]\n'


def fake_options(root: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options of a model whose interpreter, written into `root`, runs the fake engine with these variables."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items())
    interpreter = root / "python"
    interpreter.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} {fake_engine.__file__} "$@"\n')
    interpreter.chmod(0o755)
    return {"model": str(CHECKPOINT), "python_executable": str(interpreter)}


def write_repository(root: Path, **model_json: Any) -> Path:
    """A repository with the model `fake`."""
    version = root / "repository" / "fake" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(FAKE_CONFIG)
    (version / "model.json").write_text(json.dumps({**fake_options(root), **model_json}))
    return root / "repository"
