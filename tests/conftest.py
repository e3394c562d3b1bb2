"""Shared by all tests: one thread per process, as the suite runs several processes."""

from __future__ import annotations

import os

# Before anything imports torch: two xdist workers and a server share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
