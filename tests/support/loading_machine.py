"""Loads of adapters in virtual time: the real core with a machine that loads one adapter after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from engine_rig import Info

from inflight.adapters.spec import AdapterError
from inflight.config import EngineConfig
from inflight.engine.adapter import AdapterRef
from inflight.engine.assembly import make_core
from inflight.engine.attached import Attached
from inflight.engine.deltas import RequestFailed
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.policies.adapter_admission import AdapterAdmission
from inflight.engine.policies.fair_queue import FairQueue
from inflight.engine.policies.load_turns import LoadTurns
from inflight.engine.pooling import Pooling
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.frontend.request.pooled_request import void_params
from inflight.runner.adapters import AdapterTable, Entry

__all__ = ["Machine"]


class Loader(AdapterTable):
    """One load after the other, in virtual time; names that begin with "bad" fail."""

    def __init__(self, machine: Machine, limit: int, max_running: int | None) -> None:
        super().__init__(None, limit, 16, max_running, clock=lambda: machine.now)  # type: ignore[arg-type]
        self._machine = machine
        self._free = 0.0
        self._pending: list[tuple[float, Entry]] = []
        self.loads: Counter[str] = Counter()  # by name
        self.most_pending = 0

    def _submit(self, entry: Entry) -> None:
        self._free = max(self._machine.now, self._free) + self._machine.load_seconds
        self._pending.append((self._free, entry))
        self.loads[entry.ref.name] += 1
        self.most_pending = max(self.most_pending, len(self._pending))

    @property
    def next_end(self) -> float:
        return self._pending[0][0] if self._pending else 0.0

    def advance(self) -> None:
        while self._pending and self._pending[0][0] <= self._machine.now:
            entry = self._pending.pop(0)[1]
            if entry.ref.name.startswith("bad"):
                entry.loaded.set_exception(AdapterError("damaged"))
            else:
                entry.packed = entry.ref.id
                entry.loaded.set_result({"seconds": self._machine.load_seconds})


class Machine:
    """The real core; a step takes 10 ms and 0.5 ms for each token.

    Attributes:
        now: virtual seconds.
        tokens, charged: by tenant; computed, and for loads.
        first: virtual seconds from a request's arrival to its first token, by id.
        failed: by id.
    """

    draft_runner = None
    num_collected_first = 0

    def __init__(
        self,
        tenants: dict[str, Any],
        load_seconds: float = 0.3,
        kept: int = 8,
        slots: int | None = None,
        num_blocks: int = 128,
        **options: Any,
    ) -> None:
        self.now, self.load_seconds, self.steps = 0.0, load_seconds, 0
        self.table = Loader(self, kept, slots)
        self.info = Info(num_blocks=num_blocks, adapters=self.table)
        fields = {"model": "none", "block_size": 4, "enable_prefix_caching": False, "enable_lora": True}
        fields |= {"tenants": tenants, "max_num_seqs": 8, "max_queue_size": 0, **options}
        self.core = make_core(EngineConfig.from_dict(fields), self, clock=lambda: self.now)
        self.requests: dict[int, Request] = {}
        self.arrived: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.failed: dict[int, RequestFailed] = {}
        self.ended: set[int] = set()
        self.tokens: Counter[str] = Counter()
        self.charged: Counter[str] = Counter()
        self.owners: dict[int, str] = {}
        (self.admission,) = (one for one in self.core.listeners if isinstance(one, AdapterAdmission))
        if isinstance(queue := self.core.scheduler.waiting, FairQueue):
            self.queue, charge = queue, queue.charge

            def spy(request: Request, tokens: float) -> None:
                self.charged[request.tenant] += tokens  # type: ignore[assignment]
                charge(request, tokens)

            queue.charge = spy  # type: ignore[method-assign]

    @property
    def turns(self) -> LoadTurns:
        assert self.admission._turns is not None
        return self.admission._turns

    def launch(self, out: SchedulerOutput) -> StepOutput:
        for row in out.new_rows:
            self.owners[row.slot] = self.requests[row.request_id].tenant
        for slot, count in zip(out.slots, out.num_scheduled_tokens):
            self.tokens[self.owners[slot]] += count
        start = self.now
        self.now += 0.01 + 0.0005 * out.num_tokens
        return StepOutput([1 if samples else -1 for samples in out.samples], started=start, ended=self.now)

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket

    def ask(self, tenant: str, adapter: str = "", prompt: int = 6, output: int = 6, **fields: Any) -> int | None:
        """The request's id, or None if it is refused."""
        number = len(self.arrived)
        n = fields.pop("n", 1)
        pooling = Pooling("embed", "last") if fields.pop("pooled", False) else None
        ref = AdapterRef(adapter, f"id of {adapter}", "/nowhere", 4) if adapter else None
        attached = Attached(adapter=ref, pooling=pooling)
        params = void_params() if pooling else SamplingParams(max_tokens=output, ignore_eos=True, seed=0, n=n)
        message = AddRequest(number, [2] * prompt, params, arrival=self.now, tenant=tenant, attached=attached, **fields)
        self.arrived[number] = self.now
        failure = self.core.add_request(message)
        if failure is not None:
            self.failed[number] = failure
            return None
        self.requests[number] = self.core._live[number][0]
        return number

    def live_of(self, tenant: str) -> int:
        return sum(sequences[0].tenant == tenant for sequences in self.core._live.values())

    def step(self) -> None:
        self.table.advance()
        message = self.core.step()
        self.steps += 1
        if self.steps % 16 == 0:
            check_core(self.core)
        for delta in message.deltas:
            self.first.setdefault(delta.request_id, self.now - self.arrived[delta.request_id])
            if delta.finish_reason is not None:
                self.ended.add(delta.request_id)
        self.failed |= {failure.request_id: failure for failure in message.failed}
        if not message.stats.batch_size:
            next_end = self.table.next_end
            self.now = next_end if self.now < next_end < self.now + 1.0 else self.now + 0.002

    def run(self) -> None:
        self.step_until(lambda: not self.core.has_work)

    def step_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if is_so():
                return
            self.step()
        raise AssertionError("it never ends")
