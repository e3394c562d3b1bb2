"""Compiled kernels, cached until their sources change."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

__all__ = ["compiled"]

_ROOT = Path(__file__).parents[2]


def compiled(cache: pytest.Cache, folder: Path, name: str, script: str, argument: Any, sources: list[str]) -> Any:
    """The JSON in the last line that `script` prints; it runs again if it, the compiler or a source has changed.

    Args:
        cache: pytest's; one entry per name and argument.
        folder: for the compiler's own cache, which starts empty.
        sources: files and folders of `backend/inflight` and `tests/support` with the script's kernels and launches.
    """
    key = f"compiled_kernels/{name}-{hashlib.sha256(json.dumps(argument).encode()).hexdigest()[:12]}"
    digest = _digest(script, sources)
    found = cache.get(key, None)
    if found is not None and found["digest"] == digest:
        return found["report"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script, json.dumps(argument)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    cache.set(key, {"digest": digest, "report": report})
    return report


def _digest(script: str, sources: list[str]) -> str:
    found = hashlib.sha256(f"{script} {version('triton')} {sys.version}".encode())
    for source in sources:
        place = _ROOT / source
        assert place.exists(), source
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(file.read_bytes())
    return found.hexdigest()
