"""A client of the frontend that stops listening at any step and lets another engine generate the rest."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from frontend_rig import RecordingClient, RecordingStats

from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta, StepStats
from inflight.engine.integrity import check_core
from inflight.engine.logprobs import Logprobs
from inflight.engine.messages import AddRequest, StepMessage
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.text.tokenizer import Tokenizer

FLAGS = ("return_token_ids", "return_finish_reason", "return_logprobs", "return_log_probs", "return_num_output_tokens")
_STATS = StepStats(1, 0, 0, 1, 9, 0, 0, 0, 1, 1, 0.001)


class SteppedEngine:
    """An engine that steps on demand; the sender thread's aborts wait for the next step."""

    def __init__(self) -> None:
        self._aborts: deque[tuple[int, int | None]] = deque()

    def abort(self, request_id: int, index: int | None = None) -> None:
        self._aborts.append((request_id, index))

    def release(self, request_id: int) -> None:
        pass

    def apply_aborts(self) -> None:
        while self._aborts:
            self.stop(*self._aborts.popleft())

    def submit(self, request: AddRequest) -> None:
        raise NotImplementedError

    def stop(self, request_id: int, index: int | None) -> None:
        raise NotImplementedError

    def step(self) -> StepMessage | None:
        raise NotImplementedError


class CoreEngine(SteppedEngine):
    """A real core, which outlives its requests."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self.core = core

    def submit(self, request: AddRequest) -> None:
        failure = self.core.add_request(request)
        assert failure is None, failure

    def stop(self, request_id: int, index: int | None) -> None:
        self.core.abort(request_id, index)
        check_core(self.core)

    def step(self) -> StepMessage | None:
        return self.core.step() if self.core.has_work else None


class ScriptEngine(SteppedEngine):
    """Each sequence `index` of a request outputs `script[index]`, a token per step, to a stop token or `max_tokens`."""

    def __init__(self, script: list[list[int]], eos: int) -> None:
        super().__init__()
        self.script, self.eos = script, eos
        self.left: dict[int, deque[SequenceDelta]] = {}

    def submit(self, request: AddRequest) -> None:
        given = request.output_token_ids or [[]] * request.params.n
        for index, tokens in enumerate(given):
            if tokens is not None:
                assert self.script[index][: len(tokens)] == tokens, "not what the first engine generated"
                self.left[index] = deque(self._deltas(request, index, len(tokens)))

    def _deltas(self, request: AddRequest, index: int, start: int) -> Iterable[SequenceDelta]:
        params = request.params
        script = self.script[index][: params.max_tokens]
        for place in range(start, len(script)):
            token = script[place]
            stops = token in params.stop_token_ids or (token == self.eos and not params.ignore_eos)
            ends = "stop" if stops else "length" if place + 1 == params.max_tokens else None
            logprobs = None if params.logprobs is None else Logprobs.of([[(token, -(2.0**-place), 1)]])
            yield SequenceDelta(request.request_id, index, [token], ends, token if stops else None, logprobs)
            if ends:
                return

    def stop(self, request_id: int, index: int | None) -> None:
        for one in list(self.left) if index is None else [index]:
            self.left.pop(one, None)

    def step(self) -> StepMessage | None:
        deltas = [left.popleft() for left in self.left.values() if left]
        return StepMessage(deltas, _STATS) if deltas else None


@dataclass
class Received:
    """The parts of the n sequences that a client received."""

    n: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self.texts, self.reasons = [""] * self.n, ["None"] * self.n
        self.token_ids, self.logprobs = ([[] for _ in range(self.n)] for _ in range(2))
        self.sums = [0.0] * self.n

    def take(self, response: dict[str, np.ndarray]) -> None:
        start = 0
        for index, count in enumerate(response["token_counts"].tolist()):
            self.texts[index] += response["text_output"][index].decode()
            self.token_ids[index] += response["token_ids"].tolist()[start : start + count]
            start += count
            if (reason := response["finish_reason"][index].decode()) != "None":
                self.reasons[index] = reason
            self.logprobs[index] += json.loads(response["logprobs"][index]) or []
            self.sums[index] += sum(response["output_log_probs"][index].tolist()[:count])
        assert response["num_output_tokens"].tolist() == response["token_counts"].tolist()

    def as_inputs(self, tells_ends: bool) -> dict[str, np.ndarray]:
        """The request's inputs for the rest; `tells_ends`: leave out the contents of ended sequences."""
        ended = [tells_ends and reason != "None" for reason in self.reasons]
        return {
            "resume_token_ids": np.array(
                [t for ids, skip in zip(self.token_ids, ended) if not skip for t in ids], dtype=np.int64
            ),
            "resume_token_counts": np.array(
                [-1 if skip else len(ids) for ids, skip in zip(self.token_ids, ended)], dtype=np.int32
            ),
            "resume_cumulative_logprob": np.array(self.sums, dtype=np.float64),
        }


def receive(
    parser: RequestParser,
    tokenizer: Tokenizer,
    engine: SteppedEngine,
    inputs: dict[str, np.ndarray],
    into: Received,
    num_steps: int | None = None,
    interval: int = 1,
) -> None:
    """Send a request and add its responses to `into`; stop listening after `num_steps` steps of the engine."""
    errors: list[str] = []
    streams = OutputProcessor(tokenizer, engine, RecordingStats(), errors.append, interval=interval)
    streams.start()
    client = RecordingClient()
    flags = {name: np.array([True]) for name in FLAGS}
    streams.open(parser.parse(WireRequest({**flags, "stream": np.array([True]), **inputs})), client)
    while num_steps != 0 and (message := engine.step()) is not None:
        streams.on_step(message)
        engine.apply_aborts()
        if num_steps is not None:
            num_steps -= 1
    streams.stop("the test ends")
    engine.apply_aborts()
    assert not errors, errors
    for response in client.responses:
        into.take(response)
    into.complete = client.error is None
