"""Stubs that share an engine process: its start, its end, and that no process is left."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import echo
from frontend_rig import FAKE_ENGINE

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest, EngineReady, StepMessage, encode
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.engine_client.device_placement import num_sharing
from inflight.frontend.engine_client.engine_process import EngineStartError
from inflight.frontend.engine_client.shared_engine import EngineGroup, SharedEngine, find_group, group_name

CONFIG = EngineConfig(model="fake", spare_engine=False)


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sockets(name: str) -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if name in line]


class Place:
    """Where stubs meet, and the groups that were made there."""

    def __init__(self, folder: Path) -> None:
        self.name = f"inflight-test-{uuid.uuid4().hex}"
        self.control = folder / "control.json"
        self.groups: list[EngineGroup] = []

    def group(self, instance: str, **options: Any) -> EngineGroup:
        env = {"FAKE_ENGINE_CONTROL": str(self.control)}
        command = options.pop("command", FAKE_ENGINE)
        group = EngineGroup(options.pop("config", CONFIG), command, env, self.name, instance, **options)
        self.groups.append(group)
        return group

    def order(self, **orders: str) -> None:
        self.control.write_text(json.dumps(orders))

    def processes(self) -> list[int]:
        """Ids of the processes with this place's control file."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.control).encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                    found.append(int(folder.name))
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for group in place.groups:
        group.leave()
    wait_for(lambda: not place.processes())
    wait_for(lambda: not sockets(place.name))


def start(group: EngineGroup) -> SharedEngine:
    engine = group.launch()
    assert isinstance(engine.wait_ready(20), EngineReady)
    return engine


def ask(engine: SharedEngine, request_id: int, prompt: list[int], orders: str = "", max_tokens: int = 5) -> None:
    engine.send(encode(AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), tenant=orders)))


def answer(engine: SharedEngine) -> list[int]:
    tokens: list[int] = []
    while True:
        message = engine.receive()
        assert isinstance(message, StepMessage)
        for delta in message.deltas:
            tokens += delta.token_ids
            if delta.finish_reason:
                return tokens


def read_to_the_end(engine: SharedEngine) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            engine.receive()


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
    command = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in place.processes()]
    return [pid for pid, line in command if b"--fork-server" in line and b"--shared" in line]


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


# -- stubs that are processes of their own -------------------------------------------------------


_STUB = """
import json, os, sys
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[1])
from inflight.config import EngineConfig
from inflight.frontend.engine_client.shared_engine import EngineGroup
config = EngineConfig(model="fake", spare_engine=False)
group = EngineGroup(config, json.loads(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:6])
print("here", flush=True)
input()
engine = group.launch()
print(engine.pid, group.number, group._process.pid if group._process else 0, flush=True)
ready = engine.wait_ready(60)
print("ready", flush=True)
for line in sys.stdin:
    group.leave()
    print("left", flush=True)
    break
"""


class Stub:
    """A process that joins the group when told to."""

    def __init__(self, place: Place, instance: str) -> None:
        env = {"FAKE_ENGINE_CONTROL": str(place.control)}
        arguments = [json.dumps(sys.path), json.dumps(FAKE_ENGINE), json.dumps(env), place.name, instance]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STUB, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "here"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def joined(self) -> tuple[int, int, int]:
        """Process id of the engine, number of this stub, process id of the daemon if this stub started it."""
        engine, number, daemon = map(int, self.line().split())
        return engine, number, daemon

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def stubs(place: Place) -> Iterator[list[Stub]]:
    stubs = [Stub(place, f"m_{k}") for k in range(3)]
    yield stubs
    for stub in stubs:
        stub.kill()
    wait_for(lambda: not place.processes())


def test_stubs_that_start_at_once_get_one_engine(place: Place, stubs: list[Stub]) -> None:
    for stub in stubs:
        stub.go()
    joined = [stub.joined() for stub in stubs]
    assert len({engine for engine, _, _ in joined}) == 1
    assert sorted(number for _, number, _ in joined) == [0, 1, 2]
    assert sum(daemon > 0 for _, _, daemon in joined) == 1


def test_the_engine_outlives_the_stub_that_started_it(place: Place, stubs: list[Stub]) -> None:
    stubs[0].go()
    engine, _, daemon = stubs[0].joined()
    assert daemon
    for stub in stubs[1:]:
        stub.go()
        assert stub.joined()[0] == engine
    stubs[0].kill()
    assert [stub.line() for stub in stubs[1:]] == ["ready"] * 2
    stubs[1].kill()
    assert alive(engine)
    stubs[2].go()
    assert stubs[2].line() == "left"
    assert not alive(engine)


@pytest.mark.parametrize("state", ["loading", "stopped", "serving"])
def test_when_all_stubs_are_killed_nothing_is_left(place: Place, stubs: list[Stub], state: str) -> None:
    if state == "loading":
        place.order(start="hang")
    for stub in stubs:
        stub.go()
    engine = {stub.joined()[0] for stub in stubs}.pop()
    if state == "stopped":
        os.kill(engine, signal.SIGSTOP)
    for stub in stubs:
        os.kill(stub.process.pid, signal.SIGKILL)
    wait_for(lambda: not place.processes())


def test_when_the_starter_dies_during_loading_the_others_continue(place: Place, stubs: list[Stub]) -> None:
    place.order(start="hang")
    stubs[0].go()
    loading, _, _ = stubs[0].joined()
    for stub in stubs[1:]:
        stub.go()
        assert stub.joined()[0] == loading
    stubs[0].kill()
    assert alive(loading)


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


def _found_and_leave(name: str, barrier: Any, results: Any) -> None:
    group = EngineGroup(CONFIG, FAKE_ENGINE, {}, name, multiprocessing.current_process().name)
    barrier.wait()
    engine = group.launch()
    results.put(engine.pid)
    barrier.wait()
    group.leave()


@pytest.mark.parametrize("races", [12, pytest.param(50, marks=pytest.mark.nightly)])
def test_races_have_one_winner_each(place: Place, races: int) -> None:
    """Stubs that meet, leave, and meet again under the same name, without a pause between."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    for race in range(races):
        racers = [
            context.Process(target=_found_and_leave, args=(place.name, barrier, results), name=f"m_{k}")
            for k in range(3)
        ]
        for racer in racers:
            racer.start()
        assert len({results.get(timeout=20) for _ in racers}) == 1, race
        for racer in racers:
            racer.join(20)
            assert racer.exitcode == 0


def test_names_differ_by_server_model_and_configuration() -> None:
    name = group_name(CONFIG, {}, "/models/m/1", "m", "1")
    assert name == group_name(CONFIG, {}, "/models/m/1", "m", "1")
    others = [
        group_name(EngineConfig(model="fake", max_num_seqs=7), {}, "/models/m/1", "m", "1"),
        group_name(CONFIG, {"CUDA_VISIBLE_DEVICES": "1"}, "/models/m/1", "m", "1"),
        group_name(CONFIG, {}, "/models/m/2", "m", "2"),
    ]
    assert len({name, *others}) == 4
    assert len(f"\0{name}-15".encode()) < 108, "the length of a socket's address"


_GROUPS = [
    {"kind": "KIND_CPU", "count": 2},
    {"kind": "KIND_CPU", "count": 1},
    {"kind": "KIND_MODEL", "count": 1},
    {"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]},
    {"kind": "KIND_GPU", "count": 1, "gpus": [1]},
]


@pytest.mark.parametrize(
    ("kind", "device", "sharing"), [("CPU", 0, 3), ("MODEL", 0, 1), ("GPU", 0, 2), ("GPU", 1, 3), ("GPU", 2, 0)]
)
def test_instances_on_one_device_share(kind: str, device: int, sharing: int) -> None:
    assert num_sharing({"instance_group": _GROUPS}, kind, device) == sharing
    args = {
        "model_config": json.dumps({"instance_group": _GROUPS}),
        "model_instance_kind": kind,
        "model_instance_device_id": str(device),
        "model_name": "m",
        "model_version": "1",
        "model_instance_name": "m_0_0",
    }
    assert (find_group(CONFIG, {}, args, Path("/models/m/1")) is not None) == (sharing > 1)
