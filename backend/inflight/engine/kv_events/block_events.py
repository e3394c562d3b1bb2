"""Collects the changes of the prefix cache within a step.  No torch.

Blocks of a tenant, of a `cache_salt` or of another choice of their request are left out: a router knows none of these,
and would send others' requests to where they are; so no token id of such a request leaves the engine.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.kv_events.known_blocks import Change, Cleared, EventSink, Removed, Stored
from inflight.engine.request import Request

__all__ = ["BlockEvents"]


class BlockEvents(EngineListener):
    """Hands the changes of each step to `sink`; those without a step, such as of an abort, before the next one.

    If a batch is dropped, subscribers are told that all blocks are gone.  Each is told again when a request has it as
    its prefix: what subscribers know is less than the cache has, and never more.

    Args:
        sink: its subscribers forget the blocks of an earlier engine core.
    """

    def __init__(self, sink: EventSink, block_size: int) -> None:
        self._sink = sink
        self._size = block_size
        self._told: set[bytes] = set()
        self._changes: list[Change] = [Cleared()]
        self._removed: list[bytes] | None = None  # of the last change
        self._flush()

    def stored(self, request: Request, first: int, count: int, cached: Container[bytes]) -> None:
        """Tell of the request's blocks from `first` up to `count`, and of untold ones right before these.

        Args:
            cached: hashes of all blocks in the prefix cache; without others' that were evicted in between.
        """
        if not _is_public(request):
            return
        hashes, told = request.block_hashes, self._told
        while first and hashes[first - 1] not in told:
            first -= 1
        while first < count:
            end = first
            while end < count and hashes[end] not in told and hashes[end] in cached:
                end += 1
            if end > first:
                self._store(request, first, end)
            first = end + 1

    def _store(self, request: Request, first: int, end: int) -> None:
        hashes = request.block_hashes
        self._told.update(hashes[first:end])
        self._removed = None
        token_ids = request.token_ids[first * self._size : end * self._size]
        parent = hashes[first - 1] if first else None
        self._changes.append(Stored(parent, hashes[first:end], token_ids, _lora_name(request)))

    def removed(self, block_hash: bytes) -> None:
        """A block has left the prefix cache."""
        if block_hash not in self._told:
            return
        self._told.remove(block_hash)
        if self._removed is None:
            self._removed = []
            self._changes.append(Removed(self._removed))
        self._removed.append(block_hash)

    def step_begins(self, running: Sequence[Request]) -> None:
        if not running:
            self._flush()

    def step_done(self, step: DoneStep) -> None:
        self._flush()

    step_failed = step_done

    def _flush(self) -> None:
        changes, self._removed = self._changes, None
        if changes and not self._sink.put(changes):
            self._told.clear()
            self._changes = [Cleared()]
        elif changes:
            self._changes = []


def _is_public(request: Request) -> bool:
    """Whether requests without tenant and salt may have its prefix, with the same adapter."""
    of_client, *of_choices = request.cache_salts or ("",)
    if request.tenant or of_client:
        return False
    adapter = None if request.attached is None else request.attached.adapter
    return all(not salt or (adapter is not None and salt == adapter.id) for salt in of_choices)


def _lora_name(request: Request) -> str | None:
    adapter = None if request.attached is None else request.attached.adapter
    return None if adapter is None else adapter.name
