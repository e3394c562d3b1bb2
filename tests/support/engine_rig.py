"""A torch-free engine for tests: the real core, scheduler and pool over a runner that hashes.

The runner's next token is a hash of the tokens that it finds *through the block table*: if scheduler or pool
assign a wrong block, lose a token or forget to recompute one, the output changes.
"""

from __future__ import annotations

import hashlib
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec

from inflight.config import EngineConfig
from inflight.engine import assembly
from inflight.engine.adapter import Adapters
from inflight.engine.core import EngineCore
from inflight.engine.deltas import TokenColumns
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.request_choice import RequestChoice
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.step_trace import make_trace
from inflight.engine.tiers.tiers import Tiers
from inflight.grammars.base import Grammars

VOCAB = 50


@dataclass
class Info:
    max_model_len: int = 64
    vocab_size: int = VOCAB
    eos_token_ids: list[int] = field(default_factory=lambda: [0])
    num_blocks: int = 64
    num_host_blocks: int = 0
    swap_seconds_per_block: float = 0.0
    choices: list[RequestChoice] = field(default_factory=list)
    grammars: Grammars | None = None
    whole_prompts: bool = False
    tiers: Tiers | None = None
    adapters: Adapters | None = None


def done_step(out: SchedulerOutput, seconds: float) -> DoneStep:
    """A step that took so long, for listeners that learn from its time."""
    stats: Any = None
    return DoneStep(out, StepOutput(ended=seconds), [], TokenColumns(), stats, 0.0, seconds)


def next_token(token_ids: list[int]) -> int:
    """The 'model': a token that depends on every token before it."""
    return hashlib.blake2b(bytes(token_ids), digest_size=2).digest()[0] % VOCAB


def repeating(token_ids: list[int]) -> int:
    """A token determined by the last two, except that one in twenty depends on all tokens before it."""
    text = bytes(token_ids) if len(token_ids) % 20 == 0 else bytes(token_ids[-2:])
    return 1 + hashlib.blake2b(text, digest_size=2).digest()[0] % 8


@contextmanager
def repeating_model() -> Iterator[None]:
    with mock.patch.object(sys.modules[__name__], "next_token", repeating):
        yield


def expected_output(prompt: list[int], params: SamplingParams, info: Info) -> tuple[list[int], str]:
    """Tokens and finish reason that a request must yield beside any other requests."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(info.eos_token_ids))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= min(len(prompt) + params.max_tokens, info.max_model_len):
            return tokens[len(prompt) :], "length"


class PagedHashRunner:
    """Writes scheduled tokens to pool slots and reads the whole sequence back from them."""

    def __init__(
        self, info: Info, block_size: int, max_num_seqs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = info
        self.draft_runner: Any = None
        self.num_collected_first = 0
        self.clock = clock
        self.block_size = block_size
        self.pool = [[-1] * block_size for _ in range(info.num_blocks)]
        self.host_pool = [[-1] * block_size for _ in range(info.num_host_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.max_num_seqs = max_num_seqs
        self.batch_sizes: list[int] = []
        self.num_drafts = self.num_accepted = 0

    def launch(self, out: SchedulerOutput) -> StepOutput:
        return self.execute(out, self.prepare(out))

    def collect(self, ticket: StepOutput) -> StepOutput:
        """Steps and their results cross msgspec, as they would to another process, and come back equal."""
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=StepOutput)
        assert received == ticket
        return received

    def prepare(self, out: SchedulerOutput) -> None:
        pass

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        started = self.clock()
        sent, out = out, msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=SchedulerOutput)
        assert out == sent
        self._apply(out)
        assert len(set(out.slots)) == len(out.slots) <= self.max_num_seqs
        assert sum(out.num_scheduled_tokens) == out.num_tokens
        self.batch_sizes.append(len(out.slots))
        for slot, count, computed in zip(out.slots, out.num_scheduled_tokens, out.num_computed_tokens):
            assert count >= 1
            assert computed + count < self.info.max_model_len, "its last token is never computed"
            for position in range(computed, computed + count):
                block = self.tables[slot][position // self.block_size]
                self.pool[block][position % self.block_size] = self.tokens[slot][position]
        step = StepOutput(started=started)
        for row, slot in enumerate(out.slots):
            step.token_ids.append(-1)
            if not out.samples[row]:
                continue
            drafts = out.draft_token_ids.get(row, [])
            end = out.num_computed_tokens[row] + out.num_scheduled_tokens[row]
            run = []
            for length in range(end - len(drafts), end + 1):
                run.append(next_token(self._read(slot, length)))
                if len(run) > len(drafts) or run[-1] != drafts[len(run) - 1]:
                    break
            self.tokens[slot][end - len(drafts) :] = run
            if drafts:
                step.token_runs[row] = run
                self.num_drafts += len(drafts)
                self.num_accepted += len(run) - 1
            else:
                step.token_ids[row] = run[0]
        step.ended = self.clock()
        return step

    def _apply(self, out: SchedulerOutput) -> None:
        for host_block, block in out.swap_out.items():
            self.host_pool[host_block] = list(self.pool[block])
        for block, host_block in out.swap_in.items():
            self.pool[block] = list(self.host_pool[host_block])
        for slot, num_blocks in out.num_kept_blocks.items():
            del self.tables[slot][num_blocks:]
        for row in out.new_rows:
            self.tables[row.slot] = list(row.block_ids)
            self.tokens[row.slot] = array("i", row.token_ids).tolist()
        for slot, blocks in out.new_block_ids.items():
            self.tables[slot] += blocks
        for row, drafts in out.draft_token_ids.items():
            end = out.num_computed_tokens[row] + out.num_scheduled_tokens[row]
            self.tokens[out.slots[row]][end - len(drafts) :] = drafts

    def _read(self, slot: int, length: int) -> list[int]:
        """The slot's first tokens, read from the pool."""
        table, size = self.tables[slot], self.block_size
        return [self.pool[table[position // size]][position % size] for position in range(length)]


class HalfRightRunner(PagedHashRunner):
    """A draft model: depending on the text's length, it chooses the target's token or the next one."""

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        step = super().execute(out, prepared)
        for row, slot in enumerate(out.slots):
            if out.samples[row] and len(self.tokens[slot]) % 3 == 0:
                self.tokens[slot][-1] = step.token_ids[row] = (step.token_ids[row] + 1) % VOCAB
        return step


def make_core(
    info: Info, clock: Callable[[], float] = time.monotonic, listeners: Iterable[EngineListener] = (), **options: Any
) -> EngineCore:
    # Most tests make the pool too small to provoke preemption, which predicted-peak admission would avoid.
    config = EngineConfig.from_dict({"model": "hash", "admission": "free_blocks", **options})
    runner = PagedHashRunner(info, config.block_size, config.max_num_seqs, clock)
    trace = make_trace(config, info.num_blocks, clock)
    core = assembly.make_core(config, runner, clock, [*listeners, *([] if trace is None else [trace])])
    core.trace = trace  # type: ignore[attr-defined]  # for tests
    return core


def make_core_with_draft_model(
    info: Info, draft_info: Info, clock: Callable[[], float] = time.monotonic, **options: Any
) -> EngineCore:
    """`make_core` with a draft model of its own size beside the target."""
    options = {"model": "hash", "admission": "free_blocks", "speculative_config": {"model": "hash"}, **options}
    config = EngineConfig.from_dict(options)
    sizes = config.block_size, config.max_num_seqs, clock
    runner: Any = PagedHashRunner(info, *sizes)
    runner.draft_runner = HalfRightRunner(draft_info, *sizes)
    return assembly.make_core(config, runner, clock)


def run_until_idle(core: EngineCore, outputs: dict[tuple[int, int], list[int]], reasons: dict, limit: int = 20000):
    """Step until nothing is left, checking the invariants after each step."""
    for _ in range(limit):
        if not core.has_work:
            check_core(core)
            return
        collect(core, outputs, reasons)
    raise AssertionError(f"still busy after {limit} steps: a deadlock or livelock")


def collect(core: EngineCore, outputs: dict[tuple[int, int], list[int]], reasons: dict) -> None:
    message = core.step()
    check_core(core)
    assert message.stats.scheduled_tokens <= core.config.step_tokens
    for delta in message.deltas:
        key = (delta.request_id, delta.index)
        assert key not in reasons, "a sequence continued after its end"
        outputs.setdefault(key, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            reasons[key] = delta.finish_reason


def add(
    core: EngineCore, request_id: int, prompt: list[int], scheduling: dict[str, Any] | None = None, **params: Any
) -> SamplingParams:
    """Add a request that must be accepted; `scheduling` contains other fields of `AddRequest`."""
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 0, **params})
    failure = core.add_request(AddRequest(request_id, prompt, sampling, **(scheduling or {})))
    assert failure is None, failure
    return sampling
