"""KV events that a subscriber missed, and asks for: over real sockets, of engines that go on meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from typing import Any

import pytest
import zmq
from kv_events_rig import SECONDS, Ear, Subscriber, number
from kv_events_sockets import END, Probe, block_hash, end, known, publishing, removed, replay, stored, through

from inflight.engine.kv_events import publisher as publisher_module


def test_what_was_missed_is_sent_again(endpoint):
    with publishing(endpoint, replay_endpoint=f"{endpoint}-replay", buffer_steps=50) as engine:
        with closing(Ear(endpoint)) as ear:
            ear.hear()
            for index in range(1, 41):
                engine.put([stored(index)])
            ear.hear_until(lambda: len(ear.knows.blocks) == 20)
            reached = ear.knows.last
            late = Subscriber()
            late.blocks, late.last = dict(ear.knows.blocks), reached
            ear.hear_until(lambda: len(ear.knows.blocks) == 40)
        for number_, payload in replay(f"{endpoint}-replay", reached + 1):
            late.take(payload, number_)
        assert (late.gaps, late.blocks, late.last) == (0, ear.knows.blocks, ear.knows.last)
        assert replay(f"{endpoint}-replay", late.last + 1) == []


@pytest.mark.parametrize(("num_blocks", "asked"), [(30, 0), (2000, 0), (2000, 20)])
def test_what_is_not_kept_any_more_is_replaced_by_all_there_is(endpoint, num_blocks, asked):
    with publishing(endpoint, replay_endpoint=f"{endpoint}-replay", buffer_steps=10) as engine:
        engine.put([stored(0)])
        engine.put([stored(index) for index in range(1, num_blocks)])
        for _ in range(30):
            engine.put([removed(0), stored(0)])
        engine.put([stored(num_blocks)])
        late = Subscriber()
        late.blocks[7] = late.blocks[8] = None  # of an engine that is no more
        late.last = asked - 1
        with closing(Ear(endpoint)) as ear:
            ear.hear_until(lambda: known(*range(num_blocks + 1)) <= set(ear.knows.blocks))
            for number_, payload in replay(f"{endpoint}-replay", asked):
                assert number_ > late.last
                late.take(payload, number_)
            ear.hear_until(lambda: ear.knows.last == late.last)
            assert late.blocks == ear.knows.blocks


def test_a_subscriber_that_stops_delays_no_one_and_catches_up(endpoint, tmp_path):
    """It is stopped by SIGSTOP; the engine's calls return, another subscriber hears all, and it finds the gap."""
    script = (
        "import sys\nfrom kv_events_rig import Ear\nfrom kv_events_sockets import replay\n"
        "ear = Ear(sys.argv[1], RCVHWM=1)\near.hear()\nprint('hears', flush=True)\n"
        "while True:\n"
        "    topic, number, payload = ear.socket.recv_multipart()\n"
        "    number = int.from_bytes(number, 'big')\n"
        "    if number > ear.knows.last + 1:\n"
        "        ear.knows.gaps += 1\n"
        "        for again, missed in replay(sys.argv[1] + '-replay', ear.knows.last + 1):\n"
        "            ear.knows.take(missed, again)\n"
        "    elif number == ear.knows.last + 1:\n"
        "        ear.knows.take(payload, number)\n"
        "    if int(sys.argv[2]) in ear.knows.blocks:\n"
        "        print(len(ear.knows.blocks), ear.knows.gaps > 1, flush=True)\n"
        "        break\n"
    )
    count = 400
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    last = str(number(block_hash(count)))
    size = 20_000  # 60 KB a batch: sockets hold few of them
    command = [sys.executable, "-c", script, endpoint, last]
    with (
        publishing(endpoint, size, replay_endpoint=f"{endpoint}-replay", hwm=1, buffer_steps=3) as engine,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "hears\n"
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            for index in range(1, count + 1):
                assert engine.put([stored(index, num_tokens=size)])
                if index > 4:
                    assert engine.put([removed(index - 4)])
            drained = threading.Event()  # the thread is through with all of them
            engine._queue.append([Probe(drained)])
            os.eventfd_write(engine._wake, 1)
            assert drained.wait(SECONDS / 1000)
            child.send_signal(signal.SIGCONT)
            while child.poll() is None:  # whatever it lost, the next batch shows the gap
                engine.put([stored(1, num_tokens=size), removed(1)])
                try:
                    child.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
            assert child.stdout.read() == "4 True\n"
        finally:
            child.kill()


def test_an_asker_that_reads_nothing_keeps_one_answer_and_delays_no_other(endpoint, monkeypatch):
    monkeypatch.setattr(publisher_module, "_ANSWER_HWM", 2)
    monkeypatch.setattr(publisher_module, "_LOOK_SECONDS", 0.001)
    now, size, count = [0.0], 20_000, 60  # 60 KB a batch: sockets hold few of them
    address = f"{endpoint}-replay"
    with publishing(endpoint, size, lambda: now[0], replay_endpoint=address) as engine:
        for index in range(count):
            engine.put([stored(index, num_tokens=size)])
        with closing(zmq.Context.instance().socket(zmq.DEALER)) as asks:
            for name, value in ((zmq.RCVTIMEO, SECONDS), (zmq.LINGER, 0), (zmq.RCVHWM, 1)):
                asks.setsockopt(name, value)
            asks.connect(address)
            asks.send_multipart([b"", bytes(8)])
            assert asks.poll(SECONDS)
            for _ in range(3):
                asks.send_multipart([b"", bytes(8)])
                assert [number_ for number_, _ in replay(address, 0)] == [*range(count)]
            assert max(len(answer.messages) for answer in list(engine._answers.values())) > count // 2
            numbers = []
            while not numbers or numbers[-1] != END:
                numbers.append(asks.recv_multipart()[2])
            heard = [int.from_bytes(one, "big") for one in numbers[:-1]]
            assert heard[-count:] == [*range(count)] and len(heard) < 2 * count
            asks.send_multipart([b"", bytes(8)])
            assert asks.poll(SECONDS)
            for now[0] in range(20, 20 * count, 20):  # it reads nothing for so long, once its socket is full
                through(engine)
            assert not engine._answers


def test_what_is_asked_for_late_is_encoded_in_parts_and_ends_with_the_engine(endpoint, monkeypatch):
    with publishing(endpoint, replay_endpoint=f"{endpoint}-replay", buffer_steps=1) as engine:
        engine.put([stored(index) for index in range(3000)])
        for _ in range(30):
            engine.put([stored(0)])
        through(engine)
        calls: list[str] = []
        reached, goes_on = threading.Event(), threading.Event()
        pause, payload = engine._pause, engine._payload

        def paused() -> None:
            calls.append("pause")
            pause()

        def encoded(events: list[Any]) -> bytes:
            calls.append("payload")
            if calls.count("payload") == 3:
                reached.set()
                assert goes_on.wait(SECONDS / 1000)
            return payload(events)

        monkeypatch.setattr(engine, "_pause", paused)
        monkeypatch.setattr(engine, "_payload", encoded)
        with closing(zmq.Context.instance().socket(zmq.DEALER)) as asks:
            asks.setsockopt(zmq.LINGER, 0)
            asks.connect(f"{endpoint}-replay")
            asks.send_multipart([b"", bytes(8)])
            assert reached.wait(SECONDS / 1000)
            assert calls[-5:] == ["payload", "pause", "payload", "pause", "payload"]
            end(engine, goes_on)
        assert calls.count("payload") == 4  # the last one: all blocks are gone
