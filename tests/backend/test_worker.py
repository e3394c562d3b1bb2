"""The engine process, driven through its pipe, with a real tiny checkpoint."""

from __future__ import annotations

import typing
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from adapters import make_adapter, merged_checkpoint
from checkpoints import greedy_reference, make_checkpoint
from drafters import add_gate
from engine_rig import Info, make_core
from nightly import nightly_but
from processes_of import pipes_and_sockets
from worker_rig import COMMAND, ENV, Worker

from inflight.config import EngineConfig
from inflight.engine.attached import Attached
from inflight.engine.deltas import RequestFailed
from inflight.engine.frontend_channels import Frontend, Frontends, Joined
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.integrity import check_core
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    Answer,
    Ask,
    DumpTrace,
    EngineFailed,
    EngineReady,
    LoadAdapter,
    Question,
    Shutdown,
    StepMessage,
    decode_to_frontend,
    encode,
)
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import Trace
from inflight.frontend.engine_client.fork_server_process import ForkServerProcess
from inflight.worker import _HANDLERS, _IDLE_BEAT_SECONDS, _LATE_HANDLERS, Engine, _add, _answer_of, serve

READY = EngineReady(256, 199, [0], 100, 16, "float32", "cpu", "fake", 0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("process"))


@pytest.fixture(scope="module")
def fork_server(checkpoint):
    server = ForkServerProcess(encode(EngineConfig(model=checkpoint, device="cpu")), COMMAND, ENV, idle=False)
    yield server
    server.stop()


@pytest.fixture(params=nightly_but(["forked"], ["executed", "forked"]))  # e2e/test_who_may_do_what.py has no spare
def engine(checkpoint, request):
    fork_server = request.getfixturevalue("fork_server") if request.param == "forked" else None
    engine = Worker(fork_server, model=checkpoint, max_queue_size=1, max_num_seqs=2)
    yield engine
    engine.close()


def test_it_generates_aborts_refuses_answers_and_shuts_down(engine, checkpoint):
    ready = engine.receive()
    assert isinstance(ready, EngineReady)
    assert (ready.vocab_size, ready.max_model_len, ready.block_size) == (199, 256, 16)

    prompt = list(range(1, 20))
    engine.send(AddRequest(1, prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    tokens, reason = [], None
    while reason is None:
        message = engine.receive()
        assert isinstance(message, StepMessage)
        for delta in message.deltas:
            tokens += delta.token_ids
            reason = delta.finish_reason
    assert tokens == greedy_reference(checkpoint, [prompt], [20])[0]
    assert reason == "length"

    engine.send(AddRequest(2, [9999], SamplingParams()))
    refused = engine.receive()
    assert isinstance(refused, RequestFailed)
    assert (refused.request_id, refused.code) == (2, "INVALID_ARG")

    engine.send(AddRequest(3, prompt, SamplingParams(max_tokens=200, ignore_eos=True)))
    engine.receive()
    engine.send(AbortRequest(3))
    while engine.receive().stats.blocks_used:
        pass

    engine.send(Ask(1, DumpTrace()))
    assert engine.receive() == Answer(
        1, error=("INVALID_ARG", 'step_trace is off: set "step_trace": true in model.json and reload the model')
    )
    engine.send(Shutdown())
    assert engine.process.wait(timeout=20) == 0


@pytest.mark.parametrize("engine", ["forked"], indirect=True)
def test_it_exits_when_its_frontend_is_gone(engine):
    engine.receive()
    engine.send(AddRequest(1, [1, 2], SamplingParams(max_tokens=250, ignore_eos=True)))
    engine.receive()
    engine.pipe.close()
    assert engine.process.wait(timeout=20) == 0


def test_a_checkpoint_that_cannot_be_served_is_reported_as_fatal(checkpoint, fork_server):
    engine = Worker(fork_server, model=checkpoint, max_model_len=4096)
    try:
        failed = engine.receive()
        assert isinstance(failed, EngineFailed)
        assert failed.fatal
        assert "max_model_len=4096 exceeds the checkpoint's 256 positions" in failed.message
        assert engine.process.wait(timeout=20) == 1
    finally:
        engine.close()


def test_questions_are_answered_while_it_generates_and_while_it_is_idle(checkpoint, fork_server):
    engine = Worker(fork_server, model=checkpoint, step_trace=True)
    try:
        engine.receive()
        engine.send(Ask(7, DumpTrace()))  # idle
        answer = engine.receive()
        assert (answer.question_id, answer.error) == (7, None)
        assert Trace.from_json(answer.value).steps == []
        engine.send(AddRequest(1, [1, 2], SamplingParams(max_tokens=200, ignore_eos=True)))
        engine.send(Ask(8, DumpTrace()))
        engine.send(Ask(9, DumpTrace()))
        answers: list[Answer] = []
        num_tokens = 0
        while num_tokens < 200:
            message = engine.receive()
            if isinstance(message, Answer):
                answers.append(message)
            else:
                num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
        assert [answer.question_id for answer in answers] == [8, 9]
        assert Trace.from_json(answers[1].value).requests[0].request_id == 1
    finally:
        engine.close()


def test_adapters_are_loaded_beside_the_steps_and_after_a_death_by_path_and_content(checkpoint, fork_server, tmp_path):
    """The requests that were running are sent again, as the frontend does it."""
    adapter = make_adapter(tmp_path / "mine", checkpoint, strength=2.0)
    damaged = make_adapter(tmp_path / "theirs", checkpoint, seed=3)
    weights = Path(damaged.path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    prompt, params = list(range(1, 20)), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    wanted = greedy_reference(merged_checkpoint(checkpoint, adapter, tmp_path / "merged"), [prompt], [20])[0]
    assert wanted != greedy_reference(checkpoint, [prompt], [20])[0]
    engine = Worker(fork_server, model=checkpoint, enable_lora=True)
    try:
        engine.receive()
        engine.send(Ask(1, LoadAdapter(adapter)))
        engine.send(Ask(2, LoadAdapter(damaged)))
        first, second = engine.receive(), engine.receive()
        assert first.value["modules"] == 14 and first.value["id"] == adapter.id and first.value["bytes"] > 0
        assert second.error[0] == "INVALID_ARG" and "its files have changed" in second.error[1]
        engine.send(AddRequest(1, prompt, params, attached=Attached(adapter=adapter)))
        begun = tokens_until(engine, 5)
    finally:
        engine.close()  # kills it
    engine = Worker(fork_server, model=checkpoint, enable_lora=True)
    try:
        engine.receive()
        again = AddRequest(
            1, prompt, params, output_token_ids=[begun], replayed=True, attached=Attached(adapter=adapter)
        )
        engine.send(again)
        assert begun + tokens_until(engine, 20 - len(begun)) == wanted
        engine.send(AddRequest(2, prompt, params, attached=Attached(adapter=damaged)))
        failed = engine.receive()
        while not failed.failed:
            failed = engine.receive()
        assert (failed.failed[0].request_id, failed.failed[0].code) == (2, "INVALID_ARG")
    finally:
        engine.close()


def tokens_until(engine: Worker, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        message = engine.receive()
        assert isinstance(message, StepMessage) and not message.failed, message
        found += [token for delta in message.deltas for token in delta.token_ids]
    return found


def test_forks_of_a_parent_without_threads_inherit_nothing_of_each_other(checkpoint, fork_server):
    engines = [Worker(fork_server, model=checkpoint) for _ in range(2)]
    try:
        for engine in engines:
            assert isinstance(engine.receive(), EngineReady)
        parent, *forks = (psutil.Process(process.pid) for process in (fork_server, *(e.process for e in engines)))
        assert (parent.name(), parent.num_threads()) == ("inflight-spare", 1)
        assert [(fork.name(), fork.ppid()) for fork in forks] == [("inflight-engine", parent.pid)] * 2
        held = [pipes_and_sockets(process.pid) for process in (parent, *forks)]
        assert [len(fork - held[0]) for fork in held[1:]] == [2, 2], held  # the frontend's socket, its own pipe
        assert held[1] & held[2] <= held[0], held
    finally:
        for engine in engines:
            engine.close()


def test_every_question_has_a_handler():
    assert {*_HANDLERS, *_LATE_HANDLERS} == set(typing.get_args(Question) or (Question,))


def test_a_handler_that_fails_answers_with_the_error():
    question: Any = None
    answer = _answer_of(Ask(3, DumpTrace()), lambda: question.missing)
    assert answer == Answer(3, error=("INTERNAL", "AttributeError: 'NoneType' object has no attribute 'missing'"))


def test_while_all_requests_are_held_the_frontend_hears_nothing():
    core = make_core(Info())
    add_gate(core, {1: 40})
    inbox: SimpleQueue = SimpleQueue()
    sent: list = []

    class Pipe:
        def send_bytes(self, frame: bytes) -> None:
            sent.append(decode_to_frontend(frame))
            if len(sent) > 1 and not core.has_work:
                inbox.put((frontend, Shutdown()))

        def close(self) -> None: ...

    frontend = Frontend(0, Pipe())
    inbox.put((frontend, Joined()))
    inbox.put((frontend, AddRequest(1, [1, 2], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))))
    serve(Engine(core, None), Frontends(core.live_ids, READY), inbox, Heartbeat(Heartbeat.create(8), 8))
    assert sent[0] == READY
    assert [len(message.deltas) for message in sent[1:]] == [1, 1, 1]


def test_an_engine_that_is_idle_warms_up_its_grammars():
    warmed: list[str] = []
    core = make_core(Info(grammars=SimpleNamespace(warm_up=lambda: warmed.append("a vocabulary"))))
    timeouts: list[float] = []

    class Inbox(SimpleQueue):
        def get(self, timeout: float) -> Any:
            timeouts.append(timeout)
            if len(timeouts) == 1:
                raise Empty
            return None, Shutdown()

    serve(Engine(core, None), Frontends(core.live_ids, READY), Inbox(), Heartbeat(Heartbeat.create(8), 8))
    assert (warmed, timeouts) == (["a vocabulary"], [_IDLE_BEAT_SECONDS] * 2)


def test_a_request_that_cannot_be_queued_ends_alone(monkeypatch):
    """Its queued sequences are withdrawn, and the engine goes on."""
    core = make_core(Info())
    add = core.scheduler.add

    def failing(request):
        add(request)
        if request.request_id == 2:
            raise KeyError("a policy's fault")

    monkeypatch.setattr(core.scheduler, "add", failing)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=0)
    assert _add(core, AddRequest(1, [5, 6], params)) is None
    failure = _add(core, AddRequest(2, [5, 6], params))
    assert failure is not None
    assert (failure.request_id, failure.code) == (2, "INTERNAL")
    assert failure.message == 'internal error: the request cannot be queued: KeyError: "a policy\'s fault"'
    ended = set()
    while core.has_work:
        ended |= {delta.request_id for delta in core.step().deltas if delta.finish_reason}
        check_core(core)
    assert ended == {1}
