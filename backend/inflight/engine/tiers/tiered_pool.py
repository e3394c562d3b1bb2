"""The KV pool with a fourth place for blocks: reserved, while a tier fills them.  No torch.

    reserved  written by one load, of no request and not in the prefix cache  -> `reserved`

A load fills them beside the steps.  Once verified, they are adopted: cached, like blocks that a request has released.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request

__all__ = ["TieredPool"]

_MOST_SHARE = 0.25


class TieredPool(KVPool):
    """A pool whose blocks tiers read and write.

    Args:
        longest: tokens of the longest request, which fits beside all reserved blocks: a store that never ends a load
            keeps no request waiting.
        reserved: blocks that loads of an earlier engine still fill.

    Attributes:
        reserved: blocks that are being filled.
        generations: of each block, a number that changes before its contents may.
        most_reserved: blocks, at most.
    """

    def __init__(self, num_blocks: int, block_size: int, longest: int, reserved: Collection[int] = ()) -> None:
        super().__init__(num_blocks, block_size)
        self.most_reserved = max(0, min(int(num_blocks * _MOST_SHARE), num_blocks - self.blocks_for(longest)))
        self.reserved: set[int] = set(reserved)
        self.generations = [0] * num_blocks
        self._num_unpublished = 0
        self._followed: dict[Request, tuple[int, list[int]]] = {}  # `_num_unpublished` then -> the prefix found
        self._free = [block for block in self._free if block not in self.reserved]

    @property
    def num_used(self) -> int:
        return super().num_used - len(self.reserved)

    def follow(self, request: Request) -> None:
        """Its prefix will be asked for in each step, until `unfollow`; its full blocks but the last have hashes."""
        assert request.caches_blocks and len(request.block_hashes) >= (request.num_tokens - 1) // self.block_size
        assert request.params.prompt_logprobs is None or request.num_prompt_logprobs >= request.num_prompt_tokens
        self._followed[request] = self._num_unpublished, []

    def unfollow(self, request: Request) -> None:
        del self._followed[request]

    def find_prefix(self, request: Request) -> list[int]:
        """See `KVPool`.  Of requests that are followed, only what was added since the last time is looked up."""
        if request not in self._followed:
            return super().find_prefix(request)
        num_unpublished, hit = self._followed[request]
        if num_unpublished != self._num_unpublished:
            hit = []
            self._followed[request] = self._num_unpublished, hit
        block_of, hashes = self._block_of, request.block_hashes
        for index in range(len(hit), (request.num_tokens - 1) // self.block_size):
            block = block_of.get(hashes[index])
            if block is None:
                break
            hit.append(block)
        return hit

    def hashes(self, request: Request, count: int) -> list[bytes]:
        """Chain hashes of at least the first `count` blocks of a request, which are full."""
        if len(request.block_hashes) < count:
            self._hash(request, count)
        return request.block_hashes

    def reserve(self, count: int, keep: Sequence[int]) -> list[int] | None:
        """Blocks to be filled, in ascending order; they come from the free ones, then from the prefix cache.

        Args:
            keep: cached blocks that are worth more than any other: the prefix that the new ones continue.

        Returns:
            None if that would be too many; then nothing has changed.
        """
        num_available = len(self._free)
        if count > num_available:
            self.touch(keep)
            num_available = self.num_available - self.num_reclaimed(keep)
        if len(self.reserved) + count > self.most_reserved or count > num_available:
            return None
        while count > len(self._free):
            self._evict()
        blocks = sorted(self._free.pop() for _ in range(count))
        for block in blocks:
            self.generations[block] += 1
        self.reserved.update(blocks)
        return blocks

    def adopt(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Add reserved blocks, which are full, to the prefix cache; one that it has already is free again.

        Args:
            hashes: chain hashes of the blocks.

        Returns:
            How many it did not have.
        """
        num_free = len(self._free)
        for block, block_hash in zip(reversed(blocks), reversed(hashes)):  # the tail first, as in `release`
            self.reserved.remove(block)
            if block_hash in self._block_of:
                self._free.append(block)
                continue
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block
            self._cached[block] = None
        return len(blocks) - (len(self._free) - num_free)

    def unreserve(self, blocks: Sequence[int]) -> None:
        """Free reserved blocks that nothing fills any more."""
        self.reserved.difference_update(blocks)
        self._free += reversed(blocks)

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        blocks = super().extend(request, num_tokens)
        for block in blocks or ():
            self.generations[block] += 1
        return blocks

    def cached(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of these hashes that the prefix cache has, owned or not."""
        return [block for block in map(self._block_of.get, hashes) if block is not None]

    def has(self, hashes: Sequence[bytes], first: int, count: int) -> bool:
        """Whether the prefix cache has so many blocks of these hashes, from `first` on."""
        return all(hashes[index] in self._block_of for index in range(first, first + count))

    def touch(self, blocks: Sequence[int]) -> None:
        """Make cached blocks the last to be evicted, the first of them last."""
        for block in reversed(blocks):
            if block in self._cached:
                self._cached.move_to_end(block)

    def _unpublish(self, block: int) -> None:
        super()._unpublish(block)
        self.generations[block] += 1
        self._num_unpublished += 1
