"""The paged KV pool's bookkeeping: which request owns which block.  Pure Python, no torch.

A block is `block_size` token slots in every layer's KV cache.  At any time each block is in exactly one of
three places (invariant 1):

    free     not referenced, contents not worth keeping           -> `_free` (a stack)
    cached   not referenced, full, its hash known, can be reused  -> `_cached` (least recent first)
    owned    referenced by one or more block tables               -> `_ref[block] > 0`

Prefixes are found by a chain hash: the hash of a full block covers its tokens and the hash of the block
before it, so equal hashes mean equal prefixes.  The chain starts at the request's tenant and salt: prefixes of
different tenants or salts never meet, so the time to a first token reveals nothing about another tenant's
requests.  Shared blocks are full, and a request writes only at positions >= `num_computed_tokens`, past
everything it shares (invariant 2).

A block can be found as soon as the step that computes it is *scheduled*: steps run in that order, and within
a step every layer writes its keys and values before it attends.  Requests with a common prefix that arrive
together therefore compute it once.  Prompts are published that early, outputs when their request releases its
blocks: no other request has them as a prefix before that, and steps have less to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b

from inflight.engine.request import Request

__all__ = ["KVPool"]


_BLOCK_HASH = blake2b(digest_size=16)  # empty; a copy is cheaper than a new one


def _root_hash(*names: str) -> bytes:
    """The first link in the hash chains of a tenant's requests with these salts.

    The lengths keep ("ab", "c") and ("a", "bc") apart; `person` keeps roots and block hashes apart.
    """
    content = "".join([f"{len(name)}:{name}" for name in names]).encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=16, person=b"root").digest()


class KVPool:
    """Allocates blocks to requests and finds the prefixes that are already computed.

    Args:
        num_blocks: blocks in the device's KV cache.
        block_size: tokens in one block.

    Attributes:
        num_prefix_queries: prompt tokens looked up in the prefix cache so far.
        num_prefix_hits: how many of these tokens were found.
        num_references: entries of all block tables; a shared block counts once for each.
    """

    reserved: Collection[int] = ()  # blocks that are in none of the three places; see `TieredPool`

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_references = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        # Not a dict: finding a dict's first key means passing all keys deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can take: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some block table references."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the KV of the request's leading tokens, longest prefix.

        At least one token is left to compute, since its logits are needed; if prompt logprobs are requested,
        all tokens whose entries were not delivered yet.  Takes no reference: pass the result to `admit`
        before anything else is allocated.
        """
        if not request.caches_blocks:
            return []
        known = request.num_tokens
        if request.params.prompt_logprobs is not None and request.num_prompt_logprobs < request.num_prompt_tokens:
            known = request.num_prompt_logprobs
        hit: list[int] = []
        hashes = request.block_hashes
        for index in range((known - 1) // self.block_size):
            if index == len(hashes):
                self._hash(request, index + 1)
            block = self._block_of.get(hashes[index])
            if block is None:
                break
            hit.append(block)
        return hit

    def missing_blocks(self, request: Request, prefix: Sequence[int]) -> int:
        """Available blocks that all of the request's present tokens and one more would take; its last one takes none.

        A block of the prefix counts if no request owns it now.
        """
        num_tokens = min(request.num_tokens + 1, request.max_total_tokens - 1)
        return self.blocks_for(num_tokens) - len(prefix) + self.num_reclaimed(prefix)

    def num_reclaimed(self, prefix: Sequence[int]) -> int:
        """Blocks of a prefix that no request owns."""
        ref = self._ref
        return len([block for block in prefix if not ref[block]])

    def admit(self, request: Request, prefix: Sequence[int]) -> None:
        """Give a request without blocks the prefix found for it."""
        assert not request.block_ids
        for block in prefix:
            if not self._ref[block]:
                del self._cached[block]
            self._ref[block] += 1
        self._append(request, prefix)
        request.num_computed_tokens = len(prefix) * self.block_size
        if request.caches_blocks and not request.num_preemptions:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += request.num_computed_tokens

    def num_shared(self, request: Request) -> int:
        """Leading blocks of the request that other block tables reference as well."""
        blocks, ref = request.block_ids, self._ref
        return next((index for index, block in enumerate(blocks) if ref[block] == 1), len(blocks))

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Grow the request's block table to hold `num_tokens` tokens.

        Returns:
            The blocks appended (possibly none), or None when too few are available; then nothing
            has changed.
        """
        need = -(-num_tokens // self.block_size) - len(request.block_ids)
        if need > len(self._free) + len(self._cached):
            return None
        while need > len(self._free):
            self._evict()
        new, ref = [], self._ref
        for _ in range(need):
            block = self._free.pop()
            ref[block] = 1
            new.append(block)
        self._append(request, new)
        return new

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Add the full blocks of the request's first tokens to the prefix cache, once their step is scheduled.

        A block whose last token is not known yet has no hash and is not added.
        """
        full = min(num_computed_tokens, request.num_tokens) // self.block_size if request.caches_blocks else 0
        blocks, hash_of, block_of = request.block_ids, self._hash_of, self._block_of
        if not full or hash_of[blocks[full - 1]] is not None:
            return  # published, and so are all blocks before it
        hashes = request.block_hashes
        if len(hashes) < full:
            self._hash(request, full)
        for index in range(full - 1, -1, -1):
            block, block_hash = blocks[index], hashes[index]
            if hash_of[block] is not None:
                return
            if block_hash not in block_of:  # else an equal block was computed at the same time: keep the first
                hash_of[block] = block_hash
                block_of[block_hash] = block

    def forget(self, request: Request, num_tokens: int) -> list[int]:
        """Remove the request's blocks past its first `num_tokens` tokens from the prefix cache: their step failed.

        Returns:
            The blocks removed.  If the request has no blocks any more, they are the blocks with its hashes; another
            request may have computed them.
        """
        removed = []
        for block_hash in request.block_hashes[num_tokens // self.block_size :]:
            block = self._block_of.get(block_hash)
            if block is None or (request.block_ids and block not in request.block_ids):
                continue
            self._unpublish(block)
            if not self._ref[block]:
                del self._cached[block]
                self._free.append(block)
            removed.append(block)
        return removed

    def truncate(self, request: Request, num_tokens: int) -> bool:
        """Free the blocks past the request's first `num_tokens` tokens, which were for drafts now refused.

        No other request shares them, nor does the prefix cache have them: drafts are never published.

        Returns:
            Whether there were any.
        """
        kept = self.blocks_for(num_tokens)
        surplus = request.block_ids[kept:]
        if not surplus:
            return False
        for block in reversed(surplus):
            self._ref[block] = 0
            self._free.append(block)
        self.num_references -= len(surplus)
        del request.block_ids[kept:]
        request.num_computable_tokens = min(kept * self.block_size, request.max_total_tokens - 1)
        return True

    def release(self, request: Request) -> None:
        """Take all blocks from a request, the tail first, so that it is evicted first."""
        ref, hash_of = self._ref, self._hash_of
        for block in reversed(request.block_ids):
            ref[block] = left = ref[block] - 1
            if left:
                continue
            if hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        self.num_references -= len(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = request.num_computable_tokens = 0

    def _append(self, request: Request, blocks: Sequence[int]) -> None:
        """Append blocks, whose references are counted, to the request's block table."""
        request.block_ids += blocks
        room = len(request.block_ids) * self.block_size
        request.num_computable_tokens = min(room, request.max_total_tokens - 1)
        self.num_references += len(blocks)

    def _hash(self, request: Request, count: int) -> None:
        """Grow the chain hashes to the request's first `count` blocks, which are full."""
        hashes, token_ids, size = request.block_hashes, request.token_ids, self.block_size
        parent = hashes[-1] if hashes else _root_hash(request.tenant, *request.cache_salts)
        for start in range(len(hashes) * size, count * size, size):
            block_hash = _BLOCK_HASH.copy()
            block_hash.update(parent + token_ids[start : start + size].tobytes())
            parent = block_hash.digest()
            hashes.append(parent)

    def _evict(self) -> None:
        """Free the least recently used cached block."""
        block, _ = self._cached.popitem(last=False)
        self._unpublish(block)
        self._free.append(block)

    def _unpublish(self, block: int) -> None:
        """Remove the block from the prefix cache."""
        block_hash = self._hash_of[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block] = None
