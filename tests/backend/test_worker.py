"""The engine process, driven through its pipe, with a real tiny checkpoint."""

from __future__ import annotations

import typing
from queue import SimpleQueue

import psutil
import pytest
from checkpoints import greedy_reference, make_checkpoint
from drafters import add_gate
from engine_rig import Info, make_core
from nightly import nightly_but
from processes_of import pipes_and_sockets
from worker_rig import COMMAND, ENV, Worker

from inflight.config import EngineConfig
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
    Question,
    Shutdown,
    StepMessage,
    decode_to_frontend,
    encode,
)
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import Trace
from inflight.frontend.engine_client.fork_server_process import ForkServerProcess
from inflight.worker import _HANDLERS, Engine, _add, _answer, serve

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
    assert set(_HANDLERS) == set(typing.get_args(Question) or (Question,))


def test_a_handler_that_fails_answers_with_the_error(monkeypatch):
    monkeypatch.setitem(_HANDLERS, DumpTrace, lambda engine, question: engine.missing)
    answer = _answer(None, Ask(3, DumpTrace()))  # type: ignore[arg-type]
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
