"""Changes of the prefix cache as vLLM's KV events, and what a subscriber that missed none of them knows.  No torch.

The events are those of vLLM since its pull request 42892 (`vllm/distributed/kv_events.py`): MessagePack, a batch as an
array, an event as a map with its name under "type".  vllm-router reads this form, as tests/ show.

A router computes the keys of its own index from the token ids; a hash only has to be the same in later events.  It is
sent as an integer, as vLLM does by default, and of 63 bits: some subscribers read it as signed, some as unsigned.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

__all__ = ["MEDIUM", "AllBlocksCleared", "BlockRemoved", "BlockStored", "Change", "EventBatch", "EventSink"]
__all__ += ["Cleared", "KnownBlocks", "Removed", "Stored"]

# vLLM's name of the pool that attention reads, also where it is a CPU's memory: "CPU" is what was copied out of it.
MEDIUM = "GPU"
_PART = 128  # blocks


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    """Blocks that follow each other have entered the cache.

    Attributes:
        parent_block_hash: of the block before the first of them; None: they begin the sequence.
        token_ids: `block_size` for each block.
        lora_id: deprecated in vLLM.
        extra_keys: one entry for each block: what its hash covers besides tokens.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(_Event):
    """Blocks have left the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event):
    """The cache is empty."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message.

    Attributes:
        ts: seconds since 1970.
        data_parallel_rank: which of a model's engines.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Stored(NamedTuple):
    """Consecutive blocks of a sequence: chain hashes, and int32 token ids of all of them.

    Attributes:
        parent: hash of the block before them.
    """

    parent: bytes | None
    hashes: Sequence[bytes]
    token_ids: array[int]
    lora_name: str | None

    def tell(self, known: KnownBlocks) -> BlockStored:
        known.add(self)
        return known.event(self)


class Removed(NamedTuple):
    """Blocks by chain hash, in any order."""

    hashes: list[bytes]

    def tell(self, known: KnownBlocks) -> BlockRemoved:
        known.remove(self.hashes)
        return BlockRemoved(list(map(_number, self.hashes)), MEDIUM)


class Cleared(NamedTuple):
    """All blocks."""

    def tell(self, known: KnownBlocks) -> AllBlocksCleared:
        known.clear()
        return AllBlocksCleared()


class Change(Protocol):
    """One change of the cache."""

    def tell(self, known: KnownBlocks) -> Any:
        """Apply it to what subscribers know; returns the event that tells them."""


class EventSink(Protocol):
    """Takes changes from the engine's thread, which never waits for it.

    Attributes:
        num_batches: taken so far.
        num_dropped: batches that it had no room for.
    """

    num_batches: int
    num_dropped: int

    def put(self, changes: Sequence[Change]) -> bool:
        """Publish them as one batch; False: they are dropped."""

    def close(self) -> None:
        """Tell subscribers that all blocks are gone, and end."""


class _Known(msgspec.Struct, gc=False):  # so that no garbage collection looks at all of them
    parent: bytes | None
    token_ids: array[int]
    lora_name: str | None


class KnownBlocks:
    """The blocks that events so far have told of: in memory 280 bytes for each, if it has 16 tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[bytes, _Known] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, stored: Stored) -> None:
        parent, size = stored.parent, self.block_size
        for index, block_hash in enumerate(stored.hashes):
            token_ids = stored.token_ids[index * size : (index + 1) * size]
            self._blocks[block_hash] = _Known(parent, token_ids, stored.lora_name)
            parent = block_hash

    def remove(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self._blocks.pop(block_hash, None)

    def clear(self) -> None:
        self._blocks.clear()

    def event(self, stored: Stored) -> BlockStored:
        name = stored.lora_name
        return BlockStored(
            list(map(_number, stored.hashes)),
            None if stored.parent is None else _number(stored.parent),
            stored.token_ids.tolist(),
            self.block_size,
            None,
            MEDIUM,
            name,
            [None if name is None else [name]] * len(stored.hashes),
        )

    def snapshot(self, pause: Callable[[], None]) -> Iterator[list[Any]]:
        """Batches of events after which a subscriber knows all of it, whatever it knew: parents before children.

        Args:
            pause: is called before and after each part of the work that takes some tenths of a millisecond.
        """
        child: dict[bytes | None, bytes] = {}
        others: dict[bytes | None, list[bytes]] = {}  # few blocks are followed by more than one
        for index, (block_hash, known) in enumerate(self._blocks.items()):
            parent = known.parent if known.parent in self._blocks else None
            if child.setdefault(parent, block_hash) is not block_hash:
                others.setdefault(parent, []).append(block_hash)
            if index % _PART == 0:
                pause()
        events: list[Any] = [AllBlocksCleared()]
        count, pending = 0, [] if not child else [*others.get(None, ()), child[None]]
        while pending:
            run = [pending.pop()]
            while len(run) < _PART and (below := child.get(run[-1])) is not None:
                pending += others.get(run[-1], ())
                run.append(below)
            if (below := child.get(run[-1])) is not None:
                pending += *others.get(run[-1], ()), below
            events.append(self.event(self._run(run)))
            count += len(run)
            if count >= _PART:
                pause()
                yield events
                events, count = [], 0
        if events:
            yield events

    def _run(self, hashes: Sequence[bytes]) -> Stored:
        first = self._blocks[hashes[0]]
        token_ids = array("i")
        for block_hash in hashes:
            token_ids += self._blocks[block_hash].token_ids
        return Stored(first.parent, hashes, token_ids, first.lora_name)


def _number(block_hash: bytes) -> int:
    """64 bits of a hash without the first, which are positive in every subscriber's integers."""
    return int.from_bytes(block_hash[:8], "big") >> 1
