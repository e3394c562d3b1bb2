"""Stubs that share an engine process: its start, its end, and that no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from fake_engine import echo
from shared_engine_rig import Place, alive, answer, ask, read_to_the_end, sockets, start, wait_for

from inflight.config import EngineConfig
from inflight.frontend.engine_client import shared_engine
from inflight.frontend.engine_client.engine_process import EngineStartError
from inflight.frontend.engine_client.shared_engine import EngineGroup, SharedEngine
from inflight.frontend.engine_client.shared_engine_daemon import MAX_PACKET


def test_two_stubs_share_one_engine_and_the_last_one_ends_it(place: Place) -> None:
    first, second = place.group("m_0"), place.group("m_1")
    engines = start(first), start(second)
    assert (first.number, second.number) == (0, 1)
    assert engines[0].pid == engines[1].pid
    for number, engine in enumerate(engines):
        ask(engine, number << 36, [10 + number, 20])
    for number, engine in enumerate(engines):
        assert answer(engine) == echo([10 + number, 20], 5)
    first.leave()
    ask(engines[1], 1 << 36, [7, 8])
    assert answer(engines[1]) == echo([7, 8], 5)
    second.leave()
    wait_for(lambda: not alive(engines[0].pid))
    wait_for(lambda: not sockets(place.name))


def test_all_learn_how_the_engine_died_and_share_the_next_one(place: Place) -> None:
    groups = [place.group(f"m_{k}") for k in range(3)]
    engines = [start(group) for group in groups]
    os.kill(engines[0].pid, signal.SIGKILL)
    for engine in engines:
        read_to_the_end(engine)
        assert engine.exit_text() == "signal 9, SIGKILL"
        engine.close()
    again = [start(group) for group in reversed(groups)]
    assert len({engine.pid for engine in again}) == 1
    assert again[0].pid != engines[0].pid
    assert [group.number for group in groups] == [0, 1, 2]


def test_all_learn_what_the_engine_said_before_it_exited(place: Place) -> None:
    groups = [place.group(f"m_{k}") for k in range(2)]
    engines = [start(group) for group in groups]
    ask(engines[1], 1, [5], orders="fail=2")
    for engine in engines:
        read_to_the_end(engine)
        assert engine.exit_text() == "engine step failed: told to"


@pytest.mark.parametrize(
    ("order", "message", "fatal"),
    [
        ("fail", "told to fail", False),
        ("fatal", "told to fatal", True),
        ("exit", "the engine process exited while loading the model (exit status 7)", False),
    ],
)
def test_all_learn_why_it_does_not_start(place: Place, order: str, message: str, fatal: bool) -> None:
    place.order(start="hang")
    groups = [place.group(f"m_{k}") for k in range(2)]
    engines = [group.launch() for group in groups]
    os.kill(engines[0].pid, signal.SIGKILL)  # while it loads
    for engine in engines:
        with pytest.raises(EngineStartError, match=r"exited while loading the model \(signal 9, SIGKILL\)"):
            engine.wait_ready(20)
    place.order(start=order)
    for group in groups:  # one after the other, or both at the same one
        with pytest.raises(EngineStartError) as caught:
            group.launch().wait_ready(20)
        assert (str(caught.value), caught.value.fatal) == (message, fatal)


def test_an_engine_that_loads_for_too_long_is_killed_for_all(place: Place) -> None:
    place.order(start="hang")
    groups = [place.group(f"m_{k}") for k in range(2)]
    first, second = (group.launch() for group in groups)
    with pytest.raises(EngineStartError, match=r"not ready after 0\.1 s: raise engine_start_timeout"):
        first.wait_ready(0.1)
    with pytest.raises(EngineStartError, match=r"not ready after 0\.1 s: raise engine_start_timeout"):
        second.wait_ready(20)


def test_any_stub_can_kill_a_hanging_engine_and_all_learn_why(place: Place) -> None:
    engines = [start(place.group(f"m_{k}")) for k in range(2)]
    os.kill(engines[0].pid, signal.SIGSTOP)
    engines[1].kill("no step for 3 s")
    for engine in engines:
        read_to_the_end(engine)
        assert engine.exit_text() == "no step for 3 s"
    again = [start(group) for group in place.groups]
    engines[0].kill("a late verdict on the one before")
    ask(again[0], 1, [7, 8])
    assert answer(again[0]) == echo([7, 8], 5)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def spares(place: Place) -> list[int]:
    found = []
    for pid in place.processes():
        with contextlib.suppress(OSError):  # it has ended since
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] * (b"--fork-server" in line and b"--shared" in line)
    return found


def demand(pid: int) -> tuple[int, int]:
    """Which memory a process has been given to tell others that grammars are used."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"=", b"\0").split(b"\0")
    memory = os.stat(f"/proc/{pid}/fd/{int(line[line.index(b'--demand-fd') + 1])}")
    return memory.st_dev, memory.st_ino


def test_the_first_engine_of_a_group_tells_its_spare_process_whether_grammars_are_used(place: Place) -> None:
    engine = start(place.group("m_0", config=EngineConfig(model="fake")))
    (spare,) = wait_for(lambda: spares(place))
    assert parent(engine.pid) != spare
    assert demand(engine.pid) == demand(spare)


def test_the_next_engine_of_a_group_is_a_fork_of_its_spare_process(place: Place) -> None:
    groups = [place.group(f"m_{k}", config=EngineConfig(model="fake")) for k in range(2)]
    engines = [start(group) for group in groups]
    (spare,) = wait_for(lambda: spares(place))

    def died() -> list[SharedEngine]:
        os.kill(engines[0].pid, signal.SIGKILL)
        for engine in engines:
            read_to_the_end(engine)
            assert engine.exit_text() == "signal 9, SIGKILL"
        return [start(group) for group in groups]

    while parent(engines[0].pid) != spare:  # before its imports are done, a new program takes their place
        engines = died()
    engines = died()
    assert [parent(engine.pid) for engine in engines] == [spare] * 2
    assert engines[0].pid == engines[1].pid
    os.kill(spare, signal.SIGKILL)
    successor = wait_for(lambda: [pid for pid in spares(place) if pid not in (spare, engines[0].pid)])
    for number, engine in enumerate(engines):
        ask(engine, number << 36, [7, 8])
        assert answer(engine) == echo([7, 8], 5)
    assert len(successor) == 1
    for group in groups:
        group.leave()
    wait_for(lambda: not place.processes())


def test_a_frame_that_is_none_ends_the_engine(place: Place) -> None:
    engines = [start(place.group(f"m_{k}")) for k in range(2)]
    ask(engines[0], 1, [5], orders="nonsense=2")
    for engine in engines:
        read_to_the_end(engine)
        assert engine.exit_text().startswith("it sent an invalid frame: ")


def test_a_new_load_does_not_share_with_the_one_before(place: Place) -> None:
    old = [start(place.group(f"m_{k}")) for k in range(2)]
    new = [start(place.group(f"m_{k}")) for k in (1, 0)]
    assert old[0].pid == old[1].pid != new[0].pid == new[1].pid
    for group in place.groups[:2]:
        group.leave()
    assert not alive(old[0].pid)
    ask(new[0], 1, [7, 8])
    assert answer(new[0]) == echo([7, 8], 5)
    third = [start(place.group(f"m_{k}")) for k in range(2)]
    assert third[0].pid == third[1].pid != new[0].pid


def test_instances_that_are_added_share_the_engine_that_runs(place: Place) -> None:
    """Triton changes `instance_group` without a new load."""
    engines = [start(place.group(f"m_{k}")) for k in range(2)]
    assert start(place.group("m_2")).pid == engines[0].pid
    place.groups[1].leave()
    assert start(place.group("m_3")).pid != engines[0].pid, "once one has left, the model may be unloaded"


def test_a_program_that_does_not_exist_is_refused_by_name(place: Place) -> None:
    with pytest.raises(EngineStartError, match="'/no/such/python' not found; fix python_executable"):
        place.group("m_0", command=["/no/such/python"]).launch()


def test_a_name_in_use_by_another_program_is_skipped(place: Place) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(f"\0{place.name}-0")  # and never listens
        engines = [start(place.group(f"m_{k}")) for k in range(2)]
        assert engines[0].pid == engines[1].pid


def test_the_daemon_of_another_user_is_skipped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(place.group("m_0"))
    monkeypatch.setattr("inflight.frontend.engine_client.shared_engine_daemon.peer_uid", lambda end: os.geteuid() + 1)
    group = place.group("m_1")
    end = group._connect(0)
    assert end is not None
    assert not group._is_member(end)
    monkeypatch.undo()
    assert start(group).pid == first.pid


def test_stubs_tell_each_other(place: Place) -> None:
    heard: list[tuple[int, str]] = []
    groups = [place.group(f"m_{k}") for k in range(3)]
    for k, group in enumerate(groups):
        group.hear(lambda text, k=k: heard.append((k, text)))
        start(group)
    groups[1].tell("drain")
    wait_for(lambda: len(heard) == 2)
    assert sorted(heard) == [(0, "drain"), (2, "drain")]


def test_when_the_daemon_is_killed_the_stubs_start_another(place: Place) -> None:
    groups = [place.group(f"m_{k}") for k in range(2)]
    engines = [start(group) for group in groups]
    daemon = groups[0]._process
    assert daemon is not None
    daemon.kill()
    for engine in engines:
        read_to_the_end(engine)
        assert engine.exit_text() == "the process that owns the engine process died"
        engine.close()
    wait_for(lambda: not alive(engines[0].pid))
    again = [start(group) for group in reversed(groups)]
    assert again[0].pid == again[1].pid
    assert [group.number for group in groups] == [0, 1], "ids of open requests stay what they are"


def test_engines_that_a_stopped_daemon_grants_too_late_are_not_used(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read later, such a pipe repeats what another one has said, though its engine has died."""
    group, other = place.group("m_0"), place.group("m_1")
    heard, heard_by_other = list[str](), list[str]()
    group.hear(heard.append)
    other.hear(heard_by_other.append)
    first = start(group)
    start(other)
    daemon = group._process
    assert daemon is not None
    daemon.send_signal(signal.SIGSTOP)
    os.kill(first.pid, signal.SIGKILL)
    read_to_the_end(first)
    monkeypatch.setattr(shared_engine, "_JOIN_SECONDS", 0.05)
    for _ in range(3):
        with pytest.raises(EngineStartError, match="died or hangs"):
            group.launch()
    monkeypatch.undo()
    group.tell("")
    daemon.send_signal(signal.SIGCONT)
    wait_for(lambda: heard_by_other)  # all three are granted
    other.tell("")
    wait_for(lambda: heard)  # and taken
    for count, prompt in enumerate([[7, 8], [9, 10]], 2):
        engine = started_again(group)
        ask(engine, 1, prompt)
        assert answer(engine) == echo(prompt, 5)
        other.tell("")
        wait_for(lambda count=count: len(heard) == count)
        assert group._grant is None
        os.kill(engine.pid, signal.SIGKILL)
        read_to_the_end(engine)
        engine.close()


def started_again(group: EngineGroup) -> SharedEngine:
    """As by a supervisor: it asks once more if an engine dies before it is ready."""
    while True:
        engine = group.launch()
        try:
            engine.wait_ready(60)
            return engine
        except EngineStartError:
            engine.close()


def test_a_stub_of_an_earlier_version_is_served(place: Place) -> None:
    """It does not number its questions, and expects no number in the answer."""
    engine = start(place.group("m_0"))
    member = place.group("m_1")._connect(0)
    assert member is not None
    with member:
        member.send(json.dumps({"op": "join", "instance": "m_1", "number": None}).encode())
        assert json.loads(member.recv(MAX_PACKET))["op"] == "joined"
        member.send(json.dumps({"op": "engine"}).encode())
        data, descriptors, _, _ = socket.recv_fds(member, MAX_PACKET, 2)
        for descriptor in descriptors:
            os.close(descriptor)
        assert json.loads(data) == {"op": "engine", "engine": 1, "pid": engine.pid, "turn": True}
    ask(engine, 0, [7, 8])
    assert answer(engine) == echo([7, 8], 5)


def test_a_stub_waits_for_no_daemon_that_is_stopped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the socket is full: what it sends is lost until the daemon reads again, but not that it leaves."""
    monkeypatch.setattr(shared_engine, "_LEAVE_SECONDS", 0.0)
    group = place.group("m_0")
    engine = start(group)
    daemon = group._process
    assert daemon is not None
    daemon.send_signal(signal.SIGSTOP)
    sends = threading.Thread(target=lambda: [group.tell("") for _ in range(2000)], daemon=True)
    sends.start()
    sends.join(20)
    has_sent = not sends.is_alive()
    if has_sent:
        group.leave()
    daemon.send_signal(signal.SIGCONT)
    assert has_sent
    wait_for(lambda: not alive(engine.pid))
