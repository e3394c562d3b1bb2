"""These tests need a GPU.  They also run the correctness checks of the benchmarks.

    PYTHONPATH=DIR python -m pytest tests/gpu

requires torch, triton, numpy, pytest and msgspec (in DIR, if it is not installed), and transformers for the tests of
the whole engine; no plugin of pytest, and no installation of this repository (docs/gpu.md).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

if find_spec("msgspec") is None:
    raise pytest.UsageError("msgspec not found; pip install --target DIR msgspec and put DIR on PYTHONPATH")
