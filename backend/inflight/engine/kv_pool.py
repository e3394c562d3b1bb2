"""The paged KV pool's bookkeeping: which block belongs to whom.  Pure Python, no torch.

A block is `block_size` token slots in every layer's KV cache.  Each block is, at any time, in
exactly one of three places (invariant 1):

    free     not referenced, holds nothing worth keeping          -> `_free` (a stack)
    cached   not referenced, full, its hash known, can be reused  -> `_cached` (least recent first)
    owned    referenced by one or more block tables               -> `_ref[block] > 0`

Prefix hits are found by a chain hash: the hash of a full block covers its tokens and the hash
of the block before it, so equal hashes mean equal prefixes.  The chain starts at tenant and salt of
the request: prefixes of two tenants never meet, nor do those under two salts, so nobody can probe
by the time of a first token what another one asked.  Shared blocks are full, and a request only
writes at positions >= `num_computed_tokens`, past everything it shares (invariant 2).

A block is findable from when the step that computes it is *made*: steps run in that order, and within
a step every layer writes its keys and values before it attends.  Requests with a common prefix that
arrive together therefore compute it once.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from inflight.engine.request import Request

__all__ = ["KVPool"]


def _root_hash(tenant: str, salt: str) -> bytes:
    """Where the chains of a tenant's requests with this salt start.

    The length keeps ("ab", "c") and ("a", "bc") apart, `person` a root and a block's hash.
    """
    content = f"{len(tenant)}:{tenant}{salt}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=16, person=b"root").digest()


def _block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """16-byte chain hash of one full block; `parent` is the hash before it, or the root."""
    return hashlib.blake2b(parent + token_ids, digest_size=16).digest()


class KVPool:
    """Allocates blocks to requests and finds the prefixes that are already computed.

    Args:
        num_blocks: blocks in the device's KV cache.
        block_size: tokens in one block.

    Attributes:
        num_prefix_queries: prompt tokens looked up in the prefix cache, ever.
        num_prefix_hits: those of them that were found.
        num_references: entries of all block tables; a block that several share counts for each.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_references = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        # Not a dict: that would look for its first key past all those deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pack = struct.Struct(f"{block_size}i").pack  # a block's token ids as bytes
        self._ref = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could take: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some block table references."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the KV of the request's leading tokens, longest prefix.

        At least one token is always left to compute, since its logits are needed; of a request that
        asks for prompt logprobs, all whose entry was not delivered before.  Takes no reference: pass the
        result to `admit` before anything else is allocated.
        """
        if not request.caches_blocks:
            return []
        known = request.num_tokens
        if request.params.prompt_logprobs is not None and request.num_prompt_logprobs < request.num_prompt_tokens:
            known = request.num_prompt_logprobs
        hit: list[int] = []
        for index in range((known - 1) // self.block_size):
            block = self._block_of.get(self._hash(request, index))
            if block is None:
                break
            hit.append(block)
        return hit

    def missing_blocks(self, request: Request, prefix: Sequence[int]) -> int:
        """Available blocks that it takes for all the request's present tokens and one more.

        Those of the prefix count where they are available (cached) now and would be owned then.
        """
        return self.blocks_for(request.num_tokens + 1) - len(prefix) + self.num_reclaimed(prefix)

    def num_reclaimed(self, prefix: Sequence[int]) -> int:
        """Blocks of a prefix that nobody owns."""
        return sum(1 for block in prefix if not self._ref[block])

    def admit(self, request: Request, prefix: Sequence[int]) -> None:
        """Give a request without blocks the prefix found for it."""
        assert not request.block_ids
        for block in prefix:
            if not self._ref[block]:
                del self._cached[block]
            self._ref[block] += 1
        request.block_ids = list(prefix)
        self.num_references += len(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size
        if request.caches_blocks and not request.num_preemptions:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += request.num_computed_tokens

    def num_shared(self, request: Request) -> int:
        """Leading blocks of the request that other block tables reference, too."""
        blocks, ref = request.block_ids, self._ref
        return next((index for index, block in enumerate(blocks) if ref[block] == 1), len(blocks))

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Grow the request's block table to hold `num_tokens` tokens.

        Returns:
            The blocks appended (maybe none), or None when too few are available; then nothing
            has changed.
        """
        need = -(-num_tokens // self.block_size) - len(request.block_ids)
        if need <= 0:
            return []
        if need > len(self._free) + len(self._cached):
            return None
        new = [self._take()] if need == 1 else [self._take() for _ in range(need)]
        request.block_ids += new
        self.num_references += need
        return new

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Make the full blocks of the request's first tokens findable: a step was made that computes them.

        Blocks whose last token is not known yet stay hidden: they have no hash.
        """
        num_known_tokens = request.num_tokens
        full = (num_computed_tokens if num_computed_tokens < num_known_tokens else num_known_tokens) // self.block_size
        blocks, hash_of, block_of = request.block_ids, self._hash_of, self._block_of
        index = full - 1
        while index >= 0 and hash_of[block := blocks[index]] is None:  # else published, and so is all before it
            block_hash = self._hash(request, index)
            if block_hash not in block_of:  # else a twin was computed at the same time: keep the first
                hash_of[block] = block_hash
                block_of[block_hash] = block
            index -= 1

    def release(self, request: Request) -> None:
        """Take all blocks from a request.  The tail goes first, so that it is evicted first."""
        self.num_references -= len(request.block_ids)
        for block in reversed(request.block_ids):
            self._ref[block] -= 1
            if self._ref[block]:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        request.block_ids = []
        request.num_computed_tokens = 0

    def _hash(self, request: Request, index: int) -> bytes:
        """Chain hash of the request's full block `index`, computed once."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else _root_hash(request.tenant, request.cache_salt)
            start = len(hashes) * size
            hashes.append(_block_hash(parent, self._pack(*request.token_ids[start : start + size])))
        return hashes[index]

    def _take(self) -> int:
        """One available block, now owned: a free one, else the least recently used cached one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            block_hash = self._hash_of[block]
            assert block_hash is not None
            del self._block_of[block_hash]
            self._hash_of[block] = None
        self._ref[block] = 1
        return block

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert invariants 1 and 2 against the block tables of all live requests.

        Raises:
            AssertionError: naming the first block that is lost, held twice or miscounted.
        """
        tables: Counter[int] = Counter()
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids), "a block table names a block twice"
            tables.update(request.block_ids)
            writable = request.block_ids[request.num_computed_tokens // self.block_size :]
            for block in writable:
                assert self._ref[block] == 1, f"block {block} is written to and shared"
        assert self.num_references == tables.total(), "block tables are miscounted"
        for block in range(self.num_blocks):
            assert self._ref[block] == tables[block], f"block {block}: {self._ref[block]} != {tables[block]} tables"
        unowned = [*self._free, *self._cached]
        owned = [block for block in range(self.num_blocks) if self._ref[block]]
        assert sorted(unowned + owned) == list(range(self.num_blocks)), "a block is lost or in two places"
        assert all(self._hash_of[block] is None for block in self._free), "a free block is findable"
        for block_hash, block in self._block_of.items():
            assert self._hash_of[block] == block_hash, f"block {block} is found under another hash"
        assert len(self._block_of) == sum(h is not None for h in self._hash_of)
