"""Shared by all tests: one thread per process, as the suite runs several processes."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch: two xdist workers and a server share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels in the Triton language run in its interpreter where there is no GPU to compile them for.
# The language reads this once, when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
