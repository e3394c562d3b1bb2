"""KV events over real sockets: order, subscribers that come late or speak nonsense, engines that die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from typing import Any

import pytest
import zmq
from kv_events_rig import SECONDS, Ear, Subscriber
from kv_events_sockets import END, Probe, end, known, publishing, removed, stored, through

from inflight.config import ConfigError, EngineConfig
from inflight.engine.kv_events import publisher as publisher_module
from inflight.engine.kv_events.endpoint import of_rank
from inflight.engine.kv_events.known_blocks import Change, Cleared
from inflight.engine.kv_events.kv_events import make_kv_events
from inflight_tools.ports import pick_ports


def test_a_subscriber_gets_every_batch_in_order_after_all_there_was_before(endpoint):
    with publishing(endpoint, topic="kv@pod@demo", data_parallel_rank=0) as engine:
        engine.put([Cleared(), stored(1), stored(2, parent=1)])
        with closing(Ear(endpoint, "kv@")) as ear:
            ear.hear_until(lambda: set(ear.knows.blocks) == known(1, 2))
            before, gaps = ear.knows.last, ear.knows.gaps
            for index in range(3, 103):
                assert engine.put([stored(index, parent=index - 1), removed(index - 2)])
            ear.hear_until(lambda: set(ear.knows.blocks) == known(101, 102))
            assert ear.knows.gaps == gaps
            assert ear.knows.last - before in (100, 101), "also all there is, if it heard of blocks 1 and 2 before"
            assert ear.topics == {b"kv@pod@demo"}
    assert engine.num_batches == 101


def test_a_second_subscriber_gets_all_and_the_first_one_stays_right(endpoint, monkeypatch):
    monkeypatch.setattr(publisher_module, "_SNAPSHOT_SECONDS", 0.01)
    with publishing(endpoint) as engine, closing(Ear(endpoint)) as first:
        engine.put([stored(1)])
        first.hear_until(lambda: set(first.knows.blocks) == known(1))
        with closing(Ear(endpoint)) as second:
            second.hear_until(lambda: set(second.knows.blocks) == known(1))
            engine.put([stored(2, parent=1)])
            for ear in (first, second):
                ear.hear_until(lambda ear=ear: set(ear.knows.blocks) == known(1, 2))
            last = max(first.knows.last, second.knows.last)  # one can have heard once more of all there is
            for ear in (first, second):
                ear.hear_until(lambda ear=ear: ear.knows.last == last)
                assert set(ear.knows.blocks) == known(1, 2)


def test_nonsense_from_subscribers_ends_nothing(endpoint):
    with publishing(endpoint, replay_endpoint=f"{endpoint}-replay") as engine:
        with closing(zmq.Context.instance().socket(zmq.DEALER)) as liar:
            liar.setsockopt(zmq.LINGER, 0)
            liar.connect(f"{endpoint}-replay")
            for frames in ([b""], [b"", b"1"], [b"", bytes(9)], [bytes(8)], [b"", b"", bytes(8)], [b"x" * 60000] * 20):
                liar.send_multipart(frames)
            liar.send_multipart([b"", b"\xff" * 8])  # further than there is
            assert liar.recv_multipart() == [b"", b"", END, b""]
        with closing(zmq.Context.instance().socket(zmq.XSUB)) as liar:
            liar.setsockopt(zmq.LINGER, 0)
            liar.connect(endpoint)
            for frame in (b"", b"\x02", b"\x00", b"\x01nobody's topic", bytes(5000)):
                liar.send(frame)
            with closing(Ear(endpoint)) as ear:
                engine.put([stored(1)])
                ear.hear_until(lambda: set(ear.knows.blocks) == known(1))


def test_a_full_queue_drops_batches_and_never_waits(endpoint):
    with publishing(endpoint, max_queue_size=2) as engine, closing(Ear(endpoint)) as ear:
        reached, goes_on = threading.Event(), threading.Event()
        assert engine.put([Probe(reached, goes_on)])
        assert reached.wait(SECONDS / 1000)  # the thread is in that batch
        taken: list[bool] = [engine.put([stored(index)]) for index in range(5)]
        assert taken == [True, True, False, False, False]
        assert (engine.num_batches, engine.num_dropped) == (3, 3)
        goes_on.set()
        ear.hear_until(lambda: len(ear.knows.blocks) == 2)


def test_a_batch_that_cannot_be_published_costs_no_other(endpoint, monkeypatch):
    monkeypatch.setattr(publisher_module, "_SNAPSHOT_SECONDS", 0.01)

    class Broken:
        def tell(self, known_blocks: Any) -> Any:
            raise ValueError("for this test")

    with publishing(endpoint) as engine, closing(Ear(endpoint)) as ear:
        ear.hear()
        changes: list[Change] = [stored(1), Broken()]
        engine.put(changes)
        engine.put([stored(2)])
        ear.hear_until(lambda: set(ear.knows.blocks) == known(1, 2))


def test_an_engine_that_is_killed_is_forgotten_once_the_next_one_publishes(tmp_path):
    endpoint, (port,) = "tcp://127.0.0.1:{}", pick_ports(1)
    script = (
        "import sys, signal\nfrom kv_events_sockets import publishing, stored\n"
        "with publishing(f'tcp://lo:{sys.argv[1]}') as engine:\n"
        "    engine.put([stored(index) for index in map(int, sys.argv[2:])])\n"
        "    print('ready', flush=True)\n    signal.pause()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with closing(Ear(endpoint.format(port))) as ear:
        for blocks in ((1, 2, 3), (4,), ()):
            command = [sys.executable, "-c", script, str(port), *map(str, blocks)]
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
                try:
                    assert child.stdout is not None
                    assert child.stdout.readline() == "ready\n"
                    ear.hear_until(lambda blocks=blocks: set(ear.knows.blocks) == known(*blocks))
                finally:
                    child.kill()


def test_an_engine_that_ends_says_so(endpoint):
    with closing(Ear(endpoint)) as ear:
        with publishing(endpoint) as engine:
            engine.put([stored(1)])
            ear.hear_until(lambda: bool(ear.knows.blocks))
        ear.hear_until(lambda: not ear.knows.blocks)
    assert not engine.put([stored(2)])
    engine.close()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_an_address_that_another_engine_still_has_is_taken_over(kind, endpoint, monkeypatch, caplog):
    """After a reload, the old engine answers its last requests."""
    monkeypatch.setattr(publisher_module, "_RETRY_SECONDS", 0.02)
    (port,) = pick_ports(1)
    address = f"tcp://lo:{port}" if kind == "tcp" else endpoint
    with (
        closing(Ear(address.replace("lo", "127.0.0.1") if kind == "tcp" else address)) as ear,
        publishing(address) as old,
    ):
        old.put([stored(1)])
        ear.hear_until(lambda: set(ear.knows.blocks) == known(1))
        with publishing(address) as new:
            assert f"another process has {address}; it is tried again every second" in caplog.text
            new.put([stored(2)])
            old.close()
            ear.hear_until(lambda: set(ear.knows.blocks) == known(2))


def test_while_an_address_is_taken_batches_do_not_try_it_and_a_new_error_is_told_once(endpoint, monkeypatch, caplog):
    now, tries = [0.0], []

    def fails(made: Any, address: str) -> bool:
        tries.append(now[0])
        raise ConfigError("there is no such address any more")

    with publishing(endpoint) as old, publishing(endpoint, clock=lambda: now[0]) as new:
        through(new)
        monkeypatch.setattr(new, "_is_bound", fails)
        for now[0] in (0.5, 0.9, 1.0, 1.5, 2.1, 2.2):
            for _ in range(5):
                through(new)
        assert tries == [1.0, 2.1]
        assert caplog.text.count("no such address any more; it is tried again every second") == 1
        monkeypatch.undo()
        old.close()
        now[0] = 4.0
        with closing(Ear(endpoint)) as ear:
            new.put([stored(2)])
            ear.hear_until(lambda: set(ear.knows.blocks) == known(2))


def test_ten_quick_subscriptions_cost_two_snapshots(endpoint):
    now = [0.0]
    with publishing(endpoint, clock=lambda: now[0]) as engine, ExitStack() as stack:
        engine.put([stored(1)])
        ears = [stack.enter_context(closing(Ear(endpoint)))]
        ears[0].hear_until(lambda: set(ears[0].knows.blocks) == known(1) and ears[0].knows.num_cleared == 1)
        for _ in range(9):
            ears.append(stack.enter_context(closing(Ear(endpoint))))
            while not ears[-1].socket.poll(5):
                engine.put([stored(2), removed(2)])
            ears[-1].hear()  # so the engine knows of it
        now[0] = 1.0
        engine.put([stored(3)])
        for ear in ears:
            ear.hear_until(lambda ear=ear: set(ear.knows.blocks) == known(1, 3))
        last = max(ear.knows.last for ear in ears)
        for ear in ears:
            ear.hear_until(lambda ear=ear: ear.knows.last == last)
        assert [ear.knows.num_cleared for ear in ears] == [2] + [1] * 9


def test_batches_that_wait_end_with_the_engine(endpoint):
    with publishing(endpoint) as engine, closing(Ear(endpoint)) as ear:
        ear.hear()
        reached, goes_on = threading.Event(), threading.Event()
        engine.put([Probe(reached, goes_on)])
        assert reached.wait(SECONDS / 1000)
        for index in range(100):
            engine.put([stored(index)])
        before = ear.knows.last
        end(engine, goes_on)
        ear.hear_until(lambda: ear.knows.num_cleared == 2)
        assert ear.knows.last <= before + 2  # the batch that it was in, and that all blocks are gone


def test_an_engine_can_connect_to_its_subscriber():
    (port,) = pick_ports(1)
    with closing(zmq.Context.instance().socket(zmq.SUB)) as central:
        central.setsockopt(zmq.RCVTIMEO, SECONDS)
        central.subscribe(b"")
        central.bind(f"tcp://127.0.0.1:{port}")
        with publishing(f"tcp://localhost:{port}") as engine:
            engine.put([stored(1)])
            knows = Subscriber()
            while set(knows.blocks) != known(1):
                knows.take(central.recv_multipart()[2])


def test_engines_of_one_model_have_ports_of_their_own():
    assert of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert of_rank("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"
    assert of_rank("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"
    (port,) = pick_ports(1)
    with publishing(f"tcp://lo:{port - 1}", data_parallel_rank=1), closing(Ear(f"tcp://127.0.0.1:{port}")) as ear:
        ear.hear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "5557"}, "endpoint='5557' is not like tcp://\\*:5557 or ipc:///run/kv.sock"),
        ({"endpoint": "inproc://events"}, "endpoint='inproc://events' is not like"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "endpoint='tcp://0.0.0.0:5557': .*; write \\* for the host"),
        ({"endpoint": "tcp://*:0"}, "endpoint='tcp://\\*:0': the port must be a number from 1 to 65535"),
        ({"endpoint": "tcp://*:65535", "data_parallel_rank": 1}, "must be a number from 1 to 65534"),
        (
            {"replay_endpoint": "tcp://router:5558"},
            "replay_endpoint='tcp://router:5558': subscribers connect",
        ),
        ({"replay_endpoint": "tcp://*:5557"}, "both endpoints are 'tcp://\\*:5557'; give them different ports"),
        ({"endpoint": f"ipc:///{'no/' * 20}such"}, "cannot listen at ipc:///no/.*; give an address of this machine"),
    ],
)
def test_endpoints_that_cannot_be_had_are_refused(options, message):
    config = {"model": "m", "kv_events_config": {"enable_kv_cache_events": True, **options}}
    with pytest.raises(ConfigError, match=message):
        make_kv_events(EngineConfig.from_dict(config))


def test_what_is_off_takes_nothing():
    for options in (None, {}, {"enable_kv_cache_events": True, "publisher": "null"}, {"endpoint": "nonsense"}):
        assert make_kv_events(EngineConfig.from_dict({"model": "m", "kv_events_config": options})) is None
    on = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="enable_prefix_caching=false: there is no cache"):
        make_kv_events(EngineConfig.from_dict({"model": "m", "kv_events_config": on, "enable_prefix_caching": False}))


def test_without_pyzmq_the_load_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    options = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match=r'pip install "triton-inflight\[kv-events\]"'):
        make_kv_events(EngineConfig.from_dict({"model": "m", "kv_events_config": options}))
