"""Whether this process, its forks or its parent have been asked for a grammar.  No torch.

A spare process reads a vocabulary for its forks only then: it takes tens of MiB, and an engine that was forked before
has one of its own.
"""

from __future__ import annotations

import mmap

__all__ = ["are_grammars_used", "use_grammars"]

_page = mmap.mmap(-1, 1)  # which forks share


def use_grammars() -> None:
    _page[0] = 1


def are_grammars_used() -> bool:
    return bool(_page[0])
