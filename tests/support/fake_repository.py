"""A model repository whose engine is the fake one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fake_engine
from frontend_rig import CHECKPOINT


def write_repository(root: Path, **model_json: Any) -> Path:
    """A repository with the model `fake`, whose interpreter runs the fake engine."""
    interpreter = root / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_engine.__file__} "$@"\n')
    interpreter.chmod(0o755)
    version = root / "repository" / "fake" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "inflight"\ninstance_group [ { kind: KIND_CPU } ]\n')
    settings = {"model": str(CHECKPOINT), "python_executable": str(interpreter), **model_json}
    (version / "model.json").write_text(json.dumps(settings))
    return root / "repository"
