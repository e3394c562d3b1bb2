"""Whether any process of a model has been asked for a grammar.  No torch.

A spare process reads a vocabulary for its forks only then: it takes tens of MiB, and an engine that was forked before
has one of its own.
"""

from __future__ import annotations

import mmap
import os

__all__ = ["are_grammars_used", "new_demand", "share_demand", "use_grammars"]

_page = mmap.mmap(-1, 1)  # which forks share


def new_demand() -> int:
    """A descriptor of new shared memory, for the processes of a model; the kernel frees it with its last mapping."""
    descriptor = os.memfd_create("inflight-grammars")
    os.ftruncate(descriptor, 1)
    return descriptor


def share_demand(descriptor: int) -> None:
    """Have this process and its forks share it with others that were given this memory.  Closes the descriptor."""
    global _page
    _page = mmap.mmap(descriptor, 1)
    os.close(descriptor)


def use_grammars() -> None:
    _page[0] = 1


def are_grammars_used() -> bool:
    return bool(_page[0])
