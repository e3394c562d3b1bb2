"""The torch-free engine of engine_rig with KV tiers: blocks with bytes, threads that a test directs, faulty stores."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from engine_rig import Info, PagedHashRunner
from kv_memory import MemoryStore

from inflight.config import EngineConfig
from inflight.engine import assembly
from inflight.engine.core import EngineCore
from inflight.engine.events import EngineListener
from inflight.engine.integrity import check_core
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request, Status
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.tiers.base import Frames, KVStore, Read
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.engine.tiers.tiers import Tiers

NAMESPACE = bytes(range(16))
_INT = 4


class _Blocks(list):
    """Blocks that share the memory of the pool; assigning to one copies."""

    def __setitem__(self, index: Any, tokens: Any) -> None:
        for offset, token in enumerate(list(tokens)):
            self[index][offset] = token


class ByteRunner(PagedHashRunner):
    """A hash runner whose pool has bytes.  It computes a step when it is collected, as a device that is slow does.

    Attributes:
        beside: called while a step is in flight, before it reads or writes a block.
    """

    def __init__(self, info: Info, block_size: int, max_num_seqs: int, clock: Callable[[], float]) -> None:
        super().__init__(info, block_size, max_num_seqs, clock)
        self.beside: Callable[[], None] = lambda: None
        self.bytes_per_block = block_size * _INT
        self.memory = bytearray(b"\xff" * (info.num_blocks * self.bytes_per_block))
        tokens = memoryview(self.memory).cast("i")
        self.pool = _Blocks(tokens[n * block_size : (n + 1) * block_size] for n in range(info.num_blocks))  # type: ignore[assignment]

    def launch(self, out: SchedulerOutput) -> Any:
        return out

    def collect(self, ticket: Any) -> StepOutput:
        self.beside()
        return super().collect(self.execute(ticket, None))

    def fill(self, blocks: Sequence[int], read: Read) -> bool:
        return read(self.frames(blocks))

    def frames(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self.pool[block].cast("B") for block in blocks]  # type: ignore[attr-defined]

    def copy(self, blocks: Sequence[int]) -> memoryview:
        return memoryview(b"".join(self.frames(blocks)))

    def map_pages(self) -> None:
        pass


class Directed:
    """Implements `Workers`: tasks run when the test says so.  One hand for all tiers of an engine."""

    def __init__(self) -> None:
        self.tasks: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._most = 0

    def made(self, count: int, name: str, most_tasks: int) -> Directed:
        return self

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append((future, work, args))
        return future

    def offer(self, work: Callable[..., Any], *args: Any) -> bool:
        self.submit(work, *args)
        return True

    def finish(self, seconds: float) -> bool:
        self.run(len(self.tasks))
        return True

    def run(self, count: int, last_first: bool = False) -> None:
        """Do up to so many tasks."""
        for _ in range(min(count, len(self.tasks))):
            future, work, args = self.tasks.pop() if last_first else self.tasks.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(work(*args))


class LateTier(Tier):
    """The engine's thread does not wait for its answers: they come when the test says so."""

    finds_at_once = False


FAULTS = ("flip", "tear", "mix up", "lose", "raise", "find all", "find none", "keep flipped", "keep half", "keep none")


class FaultyStore(MemoryStore):
    """A store that does the next thing of a list in each call, then only what is right."""

    def __init__(self, faults: Iterable[str] = ()) -> None:
        super().__init__()
        self.given: dict[bytes, bytes] = {}  # key -> the payload that it was to keep
        self._faults = iter(faults)

    def find(self, keys: Sequence[bytes]) -> int:
        found, fault = super().find(keys), next(self._faults, "")
        if fault == "raise":
            raise OSError(5, "the medium fails")
        return len(keys) if fault == "find all" else 0 if fault == "find none" else found

    def first_of(self, keys: Sequence[bytes]) -> int:
        found, fault = super().first_of(keys), next(self._faults, "")
        if fault == "raise":
            raise OSError(5, "the medium fails")
        return len(keys) if fault == "find none" else 0 if fault == "find all" else found

    def load(self, key: bytes, frames: Frames) -> bool:
        fault = next(self._faults, "")
        if fault == "mix up" and self.extents:
            key = min(self.extents)
        found = super().load(key, frames)
        last = frames[-1]
        if fault in ("flip", "keep flipped"):
            last[len(last) // 2] ^= 1
        elif fault in ("tear", "raise"):
            last[:] = bytes(len(last))
        if fault == "raise":
            raise TimeoutError("the medium is slow")
        return found and fault != "lose"

    def store(self, key: bytes, frames: Frames) -> bool:
        self.given[key] = b"".join(frames[1:])
        fault = next(self._faults, "")
        if fault == "raise":
            raise OSError(28, "no space is left")
        super().store(key, frames)
        kept = self.extents[key]
        if fault in ("flip", "keep flipped"):
            self.extents[key] = kept[:-1] + bytes([kept[-1] ^ 128])
        elif fault in ("tear", "keep half"):
            self.extents[key] = kept[: len(kept) // 2] + bytes(len(kept) - len(kept) // 2)
        elif fault in ("lose", "keep none"):
            del self.extents[key]
        return True


class TieredRig:
    """An engine with tiers.  The clock advances by a millisecond with each step.

    Args:
        extent_blocks: blocks of an extent.
        stores: one for each tier.
        secret: see `Seal`.
        cpu_seconds: that an extent takes a tier's thread.
    """

    def __init__(
        self,
        info: Info,
        extent_blocks: int,
        stores: Sequence[KVStore],
        secret: bytes = b"",
        second: bool = False,
        cpu_seconds: float = 0.0,
        listeners: Iterable[EngineListener] = (),
        **options: Any,
    ) -> None:
        self.now = 1e6
        self.hand = Directed()
        self.config = EngineConfig.from_dict({"model": "hash", "admission": "free_blocks", **options})
        self.runner = ByteRunner(info, self.config.block_size, self.config.max_num_seqs, self.clock)
        seal = Seal(NAMESPACE, secret)
        cpu_clock = itertools.count(0, cpu_seconds).__next__
        made = [
            LateTier(f"tier{n}", one, seal, self.hand.made, "second" if second else "all", self.clock, cpu_clock)
            for n, one in enumerate(stores)
        ]
        for tier in made:
            tier.extent_cpu_seconds = cpu_seconds
        info.tiers = self.tiers = Tiers(made, self.runner, seal, self.clock)
        self.tiers.extent_blocks = extent_blocks
        self.core = self.new_core(listeners)
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}

    def clock(self) -> float:
        return self.now

    def new_core(self, listeners: Iterable[EngineListener] = ()) -> EngineCore:
        self.core = assembly.make_core(self.config, self.runner, self.clock, listeners)
        return self.core

    def step(self, num_tasks: int = 0, last_first: bool = False, num_beside: int = 0) -> None:
        """Let the tiers' threads do so many tasks, then make a step and check all invariants.

        Args:
            num_beside: tasks that they do while the step that is collected is in flight.
        """
        self.hand.run(num_tasks, last_first)
        self.check()
        self.runner.beside = lambda: self.hand.run(num_beside, last_first)
        message = self.core.step()
        self.now += 0.001
        self.check()
        for delta in message.deltas:
            key = delta.request_id, delta.index
            assert key not in self.reasons, "a sequence continued after its end"
            self.outputs.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason
        assert not message.failed, message.failed

    def check(self) -> None:
        check_core(self.core)
        pool: TieredPool = self.core.pool  # type: ignore[assignment]
        assert sorted(pool.reserved) == sorted(self.tiers.reserved)
        for request in pool._followed:
            assert request.status is Status.WAITING
            assert pool.find_prefix(request) == KVPool.find_prefix(pool, request)
        assert self.core.has_work or not pool._followed

    def payloads(self, token_ids: Sequence[int], tenant: str = "") -> dict[bytes, bytes]:
        """Key -> payload of all extents that a request has whose tokens begin with these, or are a part of them."""
        request = Request(0, token_ids, SamplingParams(max_tokens=1), tenant=tenant, cache_salts=("",))
        length = self.config.block_size * _INT
        hashes = self.core.pool.hashes(request, len(token_ids) // self.config.block_size)  # type: ignore[attr-defined]
        tokens, size = array("i", token_ids).tobytes(), self.tiers.extent_blocks
        return {
            self.tiers.seal.key_of(each): tokens[n // size * size * length : (n + 1) * length]
            for n, each in enumerate(hashes)
        }

    def run(self, num_tasks: int = 99, limit: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.core.has_work:
                self.hand.run(num_tasks)
                return
            self.step(num_tasks)
        raise AssertionError(f"still busy after {limit} steps: a deadlock or livelock")
