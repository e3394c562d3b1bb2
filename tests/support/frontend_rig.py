"""Test doubles for the frontend's surroundings: the demo checkpoint's tokenizer, and a client that records."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from inflight.engine.deltas import SequenceDelta, StepStats, TokenColumns
from inflight.engine.messages import AddRequest, StepMessage
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.output.inbox import is_one_token
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.resume import SequenceEnd
from inflight.frontend.text.tokenizer import Tokenizer

TESTS = Path(__file__).parents[1]
CHECKPOINT = TESTS.parent / "model_repository" / "demo" / "1" / "checkpoint"
FAKE_ENGINE = [sys.executable, str(TESTS / "support" / "fake_engine.py")]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)
    return value


def write_orders(control: Path, **orders: str) -> None:
    """Write the control file of a fake engine, which may be reading it."""
    written = control.with_suffix(".new")
    written.write_text(json.dumps(orders))
    written.rename(control)


def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(str(CHECKPOINT))


def make_request(
    prompt: list[int],
    *,
    returns: Iterable[str] = (),
    stream: bool = True,
    prepend_text: str = "",
    timeout: float | None = None,
    cumulative_logprobs: list[float] | None = None,
    ends: list[SequenceEnd | None] | None = None,
    cumulative: bool = False,
    separate: bool = False,
    name: str = "",
    fields: dict[str, Any] | None = None,
    **params: Any,
) -> ParsedRequest:
    """A request as the parser makes it; `fields` are further fields of `AddRequest`, `params` sampling parameters."""
    arrival = time.monotonic()
    deadline = None if timeout is None else arrival + timeout
    message = AddRequest(
        0, prompt, SamplingParams(**params), deadline=deadline, **{"arrival": arrival, **(fields or {})}
    )
    return ParsedRequest(
        message,
        stream,
        prepend_text,
        frozenset(returns),
        shows_logprobs=params.get("logprobs") is not None,
        timeout=timeout,
        cumulative_logprobs=cumulative_logprobs or [],
        ends=ends or [],
        cumulative=cumulative,
        separate=separate,
        name=name,
    )


def step_message(deltas: Iterable[SequenceDelta], stats: StepStats, **fields: Any) -> StepMessage:
    """The message of a step with these deltas; single tokens are columns, as the engine sends them."""
    full, columns = [], TokenColumns([], [], [])
    for delta in deltas:
        if is_one_token(delta):
            columns.request_ids.append(delta.request_id)
            columns.indices.append(delta.index)
            columns.token_ids.extend(delta.token_ids)
        else:
            full.append(delta)
    return StepMessage(full, stats, columns, **fields)


@dataclass
class RecordingClient:
    """A `Responder` that records, and checks that nothing follows the FINAL flag."""

    cancelled: bool = False
    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    error: tuple[str, str] | None = None
    finals: int = 0
    broken: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)

    def prepare(self, outputs: dict[str, np.ndarray], final: bool) -> Callable[[], None]:
        return partial(self.send, outputs, final)

    def send(self, outputs: dict[str, np.ndarray], final: bool) -> None:
        assert not self.finals, "a response after FINAL"
        if self.broken:
            raise RuntimeError("cannot reach the client")
        self.responses.append(outputs)
        self.arrived.set()
        if final:
            self._end()

    def fail(self, code: str, message: str) -> None:
        assert not self.finals, "an error after FINAL"
        self.error = (code, message)
        self._end()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def _end(self) -> None:
        self.finals += 1
        self.ended.set()

    def texts(self) -> list[str]:
        """The joined text of each sequence."""
        rows = [[value.decode() for value in response["text_output"]] for response in self.responses]
        return ["".join(column) for column in zip(*rows)]

    def wait(self) -> RecordingClient:
        assert self.ended.wait(60), "the stream did not end"
        return self


class RecordingStats:
    """A `StatsSink` that records.

    Attributes:
        steps: `StepStats` of each.
        streams: finished ones; `endings` has the others.
        unsettled: counts of requests since the last `settle`.
    """

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.num_tokens = 0
        self.first_tokens: list[float] = []
        self.pools: list[tuple[int, int, bool]] = []
        self.deaths = 0
        self.num_replayed = 0
        self.streams: list[Any] = []
        self.endings: list[str] = []
        self.unsettled = 0

    def step(self, message: Any, received: float, open_ids: Any) -> None:
        self.steps.append(message.stats)
        self.num_tokens += sum(len(delta.token_ids) for delta in message.deltas)

    def engine_ready(self, ready: Any, again: bool) -> None:
        self.pools.append((ready.block_size, ready.num_blocks, again))

    def engine_down(self) -> None:
        self.deaths += 1

    def resubmitted(self, count: int) -> None:
        self.num_replayed += count

    def first_token(self, stream: Any) -> None:
        self.first_tokens.append(stream.first_token_time - stream.arrival)
        self.unsettled += 1

    def finished(self, stream: Any) -> None:
        self.streams.append(stream)
        self.unsettled += 1

    def unsuccessful(self, ending: str, stream: Any = None) -> None:
        self.endings.append(ending)
        self.unsettled += 1

    def settle(self) -> None:
        self.unsettled = 0
