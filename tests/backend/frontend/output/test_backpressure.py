"""Streams that cannot be sent as fast as the engine makes tokens: it drops them meanwhile, and they lose nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import echo
from frontend_rig import CHECKPOINT, RecordingClient, RecordingStats, make_request
from offline import make_core
from resumer import CoreEngine
from supervisor_rig import PROMPT, TOKENIZER, SupervisorRig, tokens, wait_for

from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta
from inflight.engine.messages import AddRequest
from inflight.frontend.output import inbox as inbox_module
from inflight.frontend.output.backpressure import Backpressure
from inflight.frontend.output.inbox import Inbox
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.grammars.spec import GrammarSpec

LIMIT = 20


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorRig]:
    monkeypatch.setattr(inbox_module, "MOST_TOKENS", 1)  # of a turn: the backlog is noticed at once
    rig = SupervisorRig(tmp_path / "control.json").start()
    rig.streams._backpressure = Backpressure(rig.supervisor, rig.streams._events.put, rig.streams._replay.again, LIMIT)
    yield rig
    rig.stop()


def open_with_backlog(rig: SupervisorRig, n: int = 1) -> RecordingClient:
    """The only stream: the sender thread finds 40 tokens of each of its sequences at once; the rest comes with `go`."""
    gate = Event()
    rig.streams.run(lambda: gate.wait(30) and None)
    client = rig.open(orders="hold=40", n=n, max_tokens=100)
    wait_for(lambda: rig.streams._events.qsize() >= 40)  # steps, behind the stream itself
    gate.set()
    return client


def paused(rig: SupervisorRig) -> bool:
    stream = rig.streams._streams.get(1)
    return stream is not None and stream.paused


def test_a_stream_is_submitted_again_only_after_the_engines_answer() -> None:
    answer: Future[bytes] = Future()
    engine = SimpleNamespace(abort=lambda request_id: None, ask=lambda question: answer)
    submitted: list[str] = []
    backpressure = Backpressure(engine, lambda call: call(), submitted.append, 2)  # type: ignore[arg-type]
    inbox = Inbox()
    for token in (1, 2, 3):
        inbox.add_token(0, token)
    flags = dict.fromkeys(("paused", "stopped", "closed"), False)
    stream: Any = SimpleNamespace(
        inbox=inbox, request_id=1, last_act=None, end_time=None, rest=lambda: "what is left", **flags
    )
    backpressure.took(stream)
    stream.inbox.clear()
    backpressure.served(stream)
    assert (stream.paused, submitted) == (True, []), "deltas may be on their way"
    stream.inbox.add_token(0, 4)
    answer.set_result(b"")
    assert submitted == [], "one came"
    stream.inbox.clear()
    backpressure.served(stream)
    assert (stream.paused, submitted) == (False, ["what is left"])


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_with_a_backlog_pauses_in_the_engine_and_loses_no_token(rig: SupervisorRig, n: int) -> None:
    resubmitted = []
    submit = rig.supervisor.resubmit
    rig.supervisor.resubmit = lambda requests, *flags, **named: (  # type: ignore[method-assign]
        resubmitted.extend(requests),
        submit(requests, *flags, **named),
    )
    client = open_with_backlog(rig, n)
    wait_for(lambda: resubmitted)  # it was paused
    rig.order(go="")
    assert client.wait().error is None
    counts: list[list[int]] = [[] for _ in range(n)]
    for response in client.responses:
        ids = iter(response["token_ids"].tolist())
        for sequence, count in zip(counts, response["token_counts"].tolist()):
            sequence += [next(ids) for _ in range(count)]
    assert counts == [echo(PROMPT, 100)] * n
    assert rig.supervisor._send_buffer.in_engine == set()


def test_an_engine_that_dies_while_a_stream_is_paused_costs_no_token(rig: SupervisorRig) -> None:
    rig.order(answer="never")  # it stays paused
    client = open_with_backlog(rig)
    wait_for(lambda: paused(rig))
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    rig.order(go="")
    assert tokens(client.wait()) == echo(PROMPT, 100)
    assert client.error is None


def test_a_paused_stream_can_be_cancelled(rig: SupervisorRig) -> None:
    rig.order(answer="never")  # it stays paused
    client = open_with_backlog(rig)
    wait_for(lambda: paused(rig))
    client.cancelled = True
    assert client.wait().error == ("CANCELLED", "Request was cancelled")
    sent = tokens(client)
    assert sent == echo(PROMPT, 100)[: len(sent)]
    wait_for(lambda: not rig.supervisor._send_buffer.in_engine)


class PausingEngine(CoreEngine):
    """A real core; what the sender thread asks of it is done between two steps, as in the engine process."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._asked: SimpleQueue[Future[bytes]] = SimpleQueue()
        self._again: SimpleQueue[AddRequest] = SimpleQueue()
        self.num_resumed = 0

    def ask(self, question: object) -> Future[bytes]:
        answer: Future[bytes] = Future()
        self._asked.put(answer)
        return answer

    def resubmit(self, request: AddRequest) -> None:
        self._again.put(request)

    def take_messages(self) -> None:
        self.apply_aborts()
        while not self._asked.empty():
            self._asked.get().set_result(b"")
        while not self._again.empty():
            self.submit(self._again.get())
            self.num_resumed += 1


def read(core: EngineCore, limit: int | None) -> tuple[list[Any], int]:
    """Responses to a request with a grammar, and how often it was submitted again.

    Args:
        limit: of the backlog; the sender thread then stops whenever nothing is left of it, until it is exceeded.
    """
    engine, client = PausingEngine(core), RecordingClient()
    streams = OutputProcessor(TOKENIZER, engine, RecordingStats(), pytest.fail)
    may_go_on = Semaphore(0)
    if limit is not None:
        streams._backpressure = Backpressure(engine, streams._events.put, engine.resubmit, limit)
    streams.start()
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA), "")
    params = {"grammar": spec, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 200}
    returns = {"return_token_ids", "return_finish_reason"}
    streams.open(make_request([5, 6], returns=returns, **params), client)
    (stream,) = wait_for(lambda: list(streams._streams.values()))
    if limit is not None:
        for sequence in stream.sequences:

            def gated(delta: SequenceDelta, advance=sequence.advance) -> None:
                assert may_go_on.acquire(timeout=30)
                advance(delta)

            def gated_each(token_ids: list[int], advance_each=sequence.advance_each) -> None:
                assert all(may_go_on.acquire(timeout=30) for _ in token_ids)
                advance_each(token_ids)

            sequence.advance, sequence.advance_each = gated, gated_each
    num_deltas = 0
    while not client.ended.is_set():
        engine.take_messages()
        message = engine.step()
        if message is not None:
            num_deltas += len(message.deltas) + len(message.tokens.token_ids)
            streams.on_step(message)
        if limit is not None and (message is None or num_deltas > 3 * limit):
            for _ in range(num_deltas):
                may_go_on.release()
            num_deltas = 0
            time.sleep(0.001)
    streams.stop("over")
    outputs: list[list[Any]] = [["", [], ""] for _ in range(2)]
    for response in client.responses:
        ids = iter(response["token_ids"].tolist())
        for index, output in enumerate(outputs):
            output[0] += response["text_output"][index].decode()
            output[1] += [next(ids) for _ in range(response["token_counts"][index])]
            output[2] = response["finish_reason"][index].decode()
    return outputs, engine.num_resumed


SCHEMA = {
    "type": "array",
    "items": {"enum": ["a long text without a choice", "日本 ☃", 7]},
    "minItems": 12,
    "maxItems": 14,
}


def test_a_paused_stream_with_a_grammar_gets_the_same_text() -> None:
    core = make_core(str(CHECKPOINT), max_num_seqs=4)
    whole, _ = read(core, None)
    assert [reason for _, _, reason in whole] == ["stop", "stop"]
    paused, num_resumed = read(core, 4)
    assert num_resumed > 1
    assert paused == whole
