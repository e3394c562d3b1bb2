"""Several frontends on one engine: each gets its output, one leads, and none can stop the others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from engine_rig import Info, expected_output, make_core
from hypothesis import given
from hypothesis import strategies as st
from supervisor_rig import wait_for

from inflight import worker
from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats, TokenColumns
from inflight.engine.frontend_channels import (
    Frontend,
    Frontends,
    Joined,
    Left,
    QueuedChannel,
    accept_into,
    read_into,
    split_step,
)
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.integrity import check_core
from inflight.engine.messages import (
    REQUESTS_PER_FRONTEND,
    AbortRequest,
    AddRequest,
    Answer,
    Ask,
    DumpTrace,
    EngineReady,
    Shutdown,
    StepMessage,
    decode_to_frontend,
    encode,
)
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import StepTrace

READY = EngineReady(256, 199, [0], 100, 16, "float32", "cpu", "fake", 0.1)
STATS = StepStats(1, 0, 0, 1, 9, 0, 0, 0, 1, 1, 0.001)
PROMPT = [3, 1, 4]
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def request_id(number: int, count: int) -> int:
    return number * REQUESTS_PER_FRONTEND + count


def make_heartbeat() -> Heartbeat:
    page = Heartbeat.create(256)
    heartbeat = Heartbeat(page, 256)
    os.close(page)
    return heartbeat


class Recorder:
    """A channel that keeps what was sent, and reports it."""

    def __init__(self, told: Callable[[Any], None] = lambda message: None) -> None:
        self.messages: list[Any] = []
        self.closed = False
        self._told = told

    def send_bytes(self, frame: bytes) -> None:
        assert not self.closed
        self.messages.append(decode_to_frontend(frame))
        self._told(self.messages[-1])

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[StepMessage]:
        return [message for message in self.messages if isinstance(message, StepMessage)]

    def output(self, wanted: int) -> list[int]:
        """All tokens of a request's only sequence."""
        deltas = [delta for step in self.steps for delta in step.deltas]
        assert all(delta.request_id // REQUESTS_PER_FRONTEND == wanted // REQUESTS_PER_FRONTEND for delta in deltas)
        return [token for delta in deltas if delta.request_id == wanted for token in delta.token_ids]


def test_with_one_frontend_the_message_is_sent_unchanged():
    channel = Recorder()
    frontends = Frontends([], READY)
    frontends.join(Frontend(0, channel))
    message = StepMessage([], STATS, TokenColumns([1, 2], [0, 0], [7, 8]))
    frontends.send_step(message)
    assert channel.messages == [READY, message]


_IDS = st.builds(request_id, st.integers(0, 3), st.integers(1, 5))


@given(
    tokens=st.lists(st.tuples(_IDS, st.integers(0, 3), st.integers(0, 99))),
    full_deltas=st.lists(st.builds(SequenceDelta, _IDS, st.integers(0, 3), st.lists(st.integers(0, 99)))),
    failed=st.lists(st.builds(RequestFailed, _IDS, st.just("UNAVAILABLE"), st.just("late"))),
    waiting=st.lists(_IDS),
)
def test_each_delta_reaches_exactly_the_frontend_that_it_is_for(tokens, full_deltas, failed, waiting):
    columns = TokenColumns(*(list(column) for column in zip(*tokens))) if tokens else TokenColumns()
    message = StepMessage(full_deltas, STATS, columns, failed)
    channels = {number: Recorder() for number in (2, 0, 3, 1)}
    frontends = Frontends(waiting, READY)
    for number, channel in channels.items():
        frontends.join(Frontend(number, channel))
    for _ in range(2):  # the second time, the rows are the same as in the step before
        for channel in channels.values():
            channel.messages.clear()
        frontends.send_step(message)
        for number, channel in channels.items():

            def is_for(some_id: int, number: int = number) -> bool:
                return some_id // REQUESTS_PER_FRONTEND == number

            rows = [row for row in tokens if is_for(row[0])]
            mine = StepMessage(
                [delta for delta in full_deltas if is_for(delta.request_id)],
                STATS,
                TokenColumns(*map(list, zip(*rows))),
                [failure for failure in failed if is_for(failure.request_id)],
                leads=number == 2,
            )
            concerned = mine.deltas or mine.failed or number == 2 or any(map(is_for, waiting))
            assert channel.messages == ([mine] if concerned else [])


@given(st.lists(st.lists(st.tuples(_IDS, st.integers(0, 99)), max_size=6)))
def test_rows_that_come_and_go_stay_with_their_frontend(steps):
    channels = {number: Recorder() for number in range(4)}
    frontends = Frontends([], READY)
    for number, channel in channels.items():
        frontends.join(Frontend(number, channel))
    for rows in steps:
        ids, tokens = [row[0] for row in rows], [row[1] for row in rows]
        frontends.send_step(StepMessage([], STATS, TokenColumns(ids, [0] * len(rows), tokens)))
    for number, channel in channels.items():
        got = [(delta.request_id, *delta.token_ids) for step in channel.steps for delta in step.deltas]
        assert got == [row for rows in steps for row in rows if row[0] // REQUESTS_PER_FRONTEND == number]


def test_split_step_without_rows_is_empty():
    assert split_step(StepMessage([], STATS)) == {}


class Rig:
    """The step loop over a hashing runner, in this thread: messages to frontends trigger the next ones in the inbox."""

    def __init__(self, count: int, **options: Any) -> None:
        trace = StepTrace(EngineConfig(model="hash", step_trace=True), 64)
        self.core = make_core(Info(), listeners=[trace], **options)
        self.engine = worker.Engine(self.core, trace)
        self.inbox: SimpleQueue = SimpleQueue()
        self.channels = [Recorder() for _ in range(count)]
        self.frontends = [Frontend(number, channel) for number, channel in enumerate(self.channels)]
        for frontend in self.frontends:
            self.inbox.put((frontend, Joined()))

    def put(self, number: int, message: Any) -> None:
        self.inbox.put((self.frontends[number], message))

    def when(self, number: int, condition: Callable[[Any], bool], action: Callable[[], None]) -> None:
        """Run `action` at the first such message to frontend `number`."""
        done = []

        def told(message: Any) -> None:
            if not done and condition(message):
                done.append(True)
                action()

        self.channels[number]._told = told

    def run(self) -> None:
        """Serve until all requests have ended and the engine is idle."""
        step = self.core.step

        def step_and_look() -> StepMessage:
            message = step()
            if not self.core.has_work and self.inbox.empty():
                self.inbox.put((self.frontends[0], None))  # ends the loop, as `Shutdown` does
            return message

        self.core.step = step_and_look  # type: ignore[method-assign]
        worker.serve(self.engine, Frontends(self.core.live_ids, READY), self.inbox, make_heartbeat())
        check_core(self.core)


@pytest.fixture
def rig():
    return Rig(2)


def test_two_frontends_get_what_each_would_get_alone(rig):
    params = {}
    for number in range(2):
        for count in range(1, 4):
            params[number, count] = SamplingParams(temperature=0.0, max_tokens=10 * count, ignore_eos=True)
            prompt = [*PROMPT, number, count]
            rig.put(number, AddRequest(request_id(number, count), prompt, params[number, count]))
    rig.run()
    for (number, count), sampling in params.items():
        expected, _ = expected_output([*PROMPT, number, count], sampling, rig.core.info)
        assert rig.channels[number].output(request_id(number, count)) == expected
    assert all(step.leads for step in rig.channels[0].steps)
    assert not any(step.leads for step in rig.channels[1].steps)


def test_answers_and_refusals_go_to_the_sender(rig):
    rig.put(1, Ask(5, DumpTrace()))
    rig.put(0, Ask(5, DumpTrace()))
    rig.put(1, AddRequest(request_id(1, 1), [99], LONG))
    rig.put(0, AddRequest(1, PROMPT, LONG))
    rig.run()
    replies = [[m for m in c.messages if isinstance(m, (Answer, RequestFailed))] for c in rig.channels]
    assert [reply.question_id for reply in replies[0]] == [5]
    assert [type(reply) for reply in replies[1]] == [Answer, RequestFailed]


def test_a_waiting_frontend_receives_steps_without_output_for_it():
    rig = Rig(3, max_num_seqs=1)
    rig.put(1, AddRequest(request_id(1, 1), PROMPT, LONG))
    rig.put(2, AddRequest(request_id(2, 1), PROMPT, LONG))
    rig.run()
    leading, first, second = (channel.steps for channel in rig.channels)
    assert len(leading) == len(second) >= 120, "the leading and the waiting one receive every step"
    assert len(first) == 60, "a frontend that waits for nothing receives nothing more"
    assert not any(step.deltas for step in leading)


def test_a_frontend_that_leaves_ends_its_requests_and_no_others(rig):
    rig.put(0, AddRequest(1, PROMPT, LONG))
    rig.put(0, AddRequest(2, PROMPT, LONG))
    rig.put(1, AddRequest(request_id(1, 1), [*PROMPT, 5], LONG))
    rig.when(1, lambda message: isinstance(message, StepMessage), lambda: rig.put(0, Left()))
    rig.run()
    expected, _ = expected_output([*PROMPT, 5], LONG, rig.core.info)
    assert rig.channels[1].output(request_id(1, 1)) == expected
    assert rig.channels[0].closed
    assert len(rig.channels[0].output(1)) < 5
    assert not rig.core.live_ids


def test_the_next_one_leads_from_the_counts_so_far(rig):
    rig.put(0, AddRequest(1, PROMPT, LONG))
    rig.put(1, AddRequest(request_id(1, 1), [*PROMPT, 5], LONG))
    rig.when(
        0,
        lambda message: isinstance(message, StepMessage) and len(rig.channels[0].steps) == 9,
        lambda: rig.put(0, Left()),
    )
    rig.run()
    led, leads = rig.channels[0].steps, [step.leads for step in rig.channels[1].steps]
    start = leads.index(True)
    assert leads == [False] * start + [True] * (len(leads) - start)
    assert rig.channels[1].steps[start - 1] == StepMessage([], led[-1].stats, leads=False)


def test_a_late_frontend_is_served_and_a_returning_one_continues_the_counts(rig):
    rig.inbox = SimpleQueue()
    rig.put(0, Joined())
    rig.put(0, AddRequest(1, PROMPT, LONG))
    again = Recorder()

    def come_back() -> None:
        rig.put(0, Left())
        rig.inbox.put((back := Frontend(1, again), Joined()))
        rig.inbox.put((back, AddRequest(request_id(1, 1), PROMPT, LONG)))

    rig.when(0, lambda message: isinstance(message, StepMessage), come_back)
    rig.run()
    counted, *steps = again.steps
    assert (again.messages[0], counted.leads, counted.deltas) == (READY, False, [])
    assert counted.stats.prefix_queries_total == rig.channels[0].steps[-1].stats.prefix_queries_total > 0
    assert all(step.leads for step in steps)
    assert again.output(request_id(1, 1)) == expected_output(PROMPT, LONG, rig.core.info)[0]


def test_a_request_may_be_aborted_beside_another_with_the_same_count(rig):
    rig.put(0, AddRequest(request_id(0, 1), PROMPT, LONG))
    rig.put(1, AddRequest(request_id(1, 1), PROMPT, LONG))
    rig.when(0, lambda message: isinstance(message, StepMessage), lambda: rig.put(0, AbortRequest(1)))
    rig.run()
    assert rig.channels[1].output(request_id(1, 1)) == expected_output(PROMPT, LONG, rig.core.info)[0]


# -- pipes -------------------------------------------------------------------------------------


def read_all(end: socket.socket) -> list[Any]:
    """Messages until the pipe closes."""
    messages = []
    connection = Connection(end.detach())
    try:
        while True:
            messages.append(decode_to_frontend(connection.recv_bytes()))
    except (EOFError, OSError):
        return messages


def test_frames_that_do_not_fit_the_pipe_arrive_later_whole_and_in_order():
    ours, theirs = socket.socketpair()
    channel = QueuedChannel(ours)
    sent = [Answer(k, bytes(100_000)) for k in range(40)]
    for message in sent:
        channel.send_bytes(encode(message))  # the other end does not read, and this returns
    done: SimpleQueue = SimpleQueue()
    threading.Thread(target=lambda: done.put(read_all(theirs)), daemon=True).start()
    last = Answer(99)
    channel.send_bytes(encode(last))
    while channel.num_unsent:
        threading.Event().wait(0.005)
    channel.close()
    assert done.get(timeout=20) == [*sent, last]


def test_a_frontend_that_leaves_too_much_unread_is_cut_off():
    ours, theirs = socket.socketpair()
    channel = QueuedChannel(ours, max_unread=1_000_000)
    for k in range(40):
        channel.send_bytes(encode(Answer(k, bytes(100_000))))
    assert ours.recv(1) == b"", "the thread that reads from it sees the end"
    assert len(read_all(theirs)) < 40
    channel.send_bytes(encode(Answer(1)))  # of no effect


def test_a_closed_frontend_is_no_error():
    ours, theirs = socket.socketpair()
    channel = QueuedChannel(ours)
    theirs.close()
    for _ in range(3):
        channel.send_bytes(encode(Answer(1)))
    channel.close()
    channel.close()


class Engine:
    """The step loop in a thread, owned through a pipe, as a keeper owns it."""

    def __init__(self, core: EngineCore) -> None:
        self.keeper, pipe = socket.socketpair()
        self._connection = Connection(pipe.detach())
        owner, inbox = Frontend(0, self._connection), SimpleQueue()
        self.threads = [
            threading.Thread(target=accept_into, args=(inbox, owner, self._connection), daemon=True),
            threading.Thread(
                target=worker.serve,
                args=(worker.Engine(core, None), Frontends(core.live_ids, READY), inbox, make_heartbeat()),
                daemon=True,
            ),
        ]
        for thread in self.threads:
            thread.start()

    def connect(self, number: int, send_buffer: int | None = None) -> Connection:
        ours, theirs = socket.socketpair()
        if send_buffer is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        with theirs:
            socket.send_fds(self.keeper, [number.to_bytes(4, "big")], [theirs.fileno()])
        connection = Connection(ours.detach())
        assert isinstance(decode_to_frontend(connection.recv_bytes()), EngineReady)
        return connection

    def stop(self) -> None:
        self.keeper.close()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def stream(connection: Connection, wanted: int) -> list[int]:
    tokens: list[int] = []
    while True:
        for delta in decode_to_frontend(connection.recv_bytes()).deltas:
            assert delta.request_id == wanted
            tokens += delta.token_ids
            if delta.finish_reason:
                return tokens


def test_frontends_come_and_go_through_the_owners_pipe():
    core = make_core(Info())
    engine = Engine(core)
    expected, _ = expected_output(PROMPT, LONG, core.info)
    pipes = {number: engine.connect(number) for number in (0, 1, 7)}
    for number, pipe in pipes.items():
        pipe.send_bytes(encode(AddRequest(request_id(number, 1), PROMPT, LONG)))
    pipes.pop(0).close()  # it dies with its request open
    for number, pipe in pipes.items():
        assert stream(pipe, request_id(number, 1)) == expected
        pipe.close()
    late = engine.connect(8)
    late.send_bytes(encode(AddRequest(request_id(8, 1), PROMPT, LONG)))
    assert stream(late, request_id(8, 1)) == expected
    late.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(9, 40):
        engine.connect(number).close()
    last = engine.connect(40)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 8)
    last.close()
    engine.stop()
    assert not core.live_ids


def test_the_requests_of_a_frontend_stay_while_it_has_another_pipe():
    """Its owner has sent two, because it answered the first time too late."""
    core = make_core(Info())
    engine = Engine(core)
    expected, _ = expected_output(PROMPT, LONG, core.info)
    late, used = engine.connect(3), engine.connect(3)
    used.send_bytes(encode(AddRequest(request_id(3, 1), PROMPT, LONG)))
    late.close()
    assert stream(used, request_id(3, 1)) == expected
    used.close()
    engine.stop()
    assert not core.live_ids


def test_the_requests_over_a_pipe_end_with_it_though_its_frontend_has_another(rig):
    """A pipe that is cut off can close behind the next one of the same stub."""
    again = Recorder()
    back = Frontend(1, again)
    rig.put(1, AddRequest(request_id(1, 1), PROMPT, LONG))

    def come_back() -> None:
        rig.inbox.put((back, Joined()))
        rig.put(1, Left())

    rig.when(1, lambda message: isinstance(message, StepMessage), come_back)
    rig.run()
    assert rig.channels[1].closed
    assert len(rig.channels[1].output(request_id(1, 1))) < 5
    assert not again.output(request_id(1, 1))
    assert not rig.core.live_ids


def test_a_replay_over_the_next_pipe_takes_the_place_of_its_request(rig):
    again = Recorder()
    back = Frontend(1, again)
    rig.put(1, AddRequest(request_id(1, 1), PROMPT, LONG))

    def come_back() -> None:
        rig.inbox.put((back, Joined()))
        rig.inbox.put((back, AddRequest(request_id(1, 1), PROMPT, LONG)))
        rig.put(1, Left())

    rig.when(1, lambda message: isinstance(message, StepMessage), come_back)
    rig.run()
    assert again.output(request_id(1, 1)) == expected_output(PROMPT, LONG, rig.core.info)[0]
    assert not rig.core.live_ids


def test_pipes_of_requests_that_have_ended_are_forgotten():
    live = [request_id(1, 0)]
    frontends = Frontends(live, READY)
    frontend = Frontend(1, Recorder())
    frontends.join(frontend)
    for count in range(5000):
        assert not frontends.takes_over(frontend, request_id(1, count))
    assert len(frontends._came_over) < 1100
    assert frontends.leave(frontend) == live
    assert not frontends._came_over, "its descriptors would stay open"


def test_a_frontend_that_reads_nothing_does_not_stop_the_others():
    core = make_core(Info(max_model_len=400))
    engine = Engine(core)
    stuck, pipe = engine.connect(0, send_buffer=1), engine.connect(1)  # full after the first few steps
    params = msgspec.structs.replace(LONG, max_tokens=380)
    stuck.send_bytes(encode(AddRequest(1, PROMPT, params)))
    for count in range(1, 5):
        pipe.send_bytes(encode(AddRequest(request_id(1, count), [*PROMPT, count], LONG)))
        assert stream(pipe, request_id(1, count)) == expected_output([*PROMPT, count], LONG, core.info)[0]
    assert stream(stuck, 1) == expected_output(PROMPT, params, core.info)[0]
    engine.stop()


def test_an_undecodable_frame_ends_its_frontend_and_blocks_no_other():
    ours, theirs = socket.socketpair()
    inbox: SimpleQueue = SimpleQueue()
    owner = Frontend(0, Recorder())
    with ours, theirs:
        sender = Connection(os.dup(ours.fileno()))
        sender.send_bytes(encode(Shutdown()))
        sender.send_bytes(b"nonsense")
        read_into(inbox, owner, Connection(os.dup(theirs.fileno())))
    messages = [inbox.get() for _ in range(3)]
    assert [(sender, type(message)) for sender, message in messages] == [
        (owner, Joined),
        (owner, Shutdown),
        (owner, Shutdown),
    ]
