"""Nothing here runs without a GPU.  The benchmark's grids of correctness are these tests' too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
