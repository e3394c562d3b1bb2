"""How fast adapters are loaded beside steps: the order is forced, on clocks that are set."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.adapter import AdapterRef
from inflight.runner import adapters
from inflight.runner.adapter_loader import LoaderPace, LoaderThread

SLICE = 0.004  # CPU seconds
STEP = 0.1


class Rig:
    """A load of ten slices, in the loader's thread.

    Attributes:
        done: slices.
        waits: is set when the thread waits for the pace.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 0.0
        self.is_taken = False
        self.done = 0
        self.waits, self.ended = threading.Event(), threading.Event()
        self.pace = LoaderPace(lambda: self.is_taken, lambda: self.now, lambda: self.cpu)
        self.loader = LoaderThread(self.pace, lambda: self.done * SLICE, lambda: self.now)
        wait = self.pace._changed.wait

        def waits(timeout: float) -> bool:
            """It ends when it is notified: time passes on the clocks that are set, and on no other one."""
            assert timeout > 0
            self.waits.set()
            return wait()

        monkeypatch.setattr(self.pace._changed, "wait", waits)

    def step(self, seconds: float = STEP, num_running: int = 8) -> None:
        self.waits.clear()
        self.now += seconds
        self.cpu += 2 * seconds
        self.pace.step_done(seconds, num_running)

    def load(self, then: Callable[[], None] = lambda: None) -> None:
        def work() -> None:
            for _ in range(10):
                self.done += 1
                self.loader.pause()
            then()
            self.ended.set()

        self.loader.submit(work)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(monkeypatch)
    rig.step()
    rig.step()
    return rig


def test_each_step_leaves_a_load_a_tenth_of_its_time(rig: Rig) -> None:
    """10 ms: three slices, the last one 2 ms too long; the next step pays for them."""
    rig.load()
    for done in (3, 5, 8, 10):
        assert rig.waits.wait(60) and rig.done == done
        rig.step()
    assert rig.ended.wait(60) and rig.done == 10


def test_beside_nothing_a_load_never_waits(rig: Rig) -> None:
    rig.load()
    assert rig.waits.wait(60) and rig.done == 3
    rig.step(num_running=0)
    assert rig.ended.wait(60) and not rig.waits.is_set()


def test_the_shorter_of_two_steps_counts_and_a_long_one_no_more_than_ten_milliseconds(rig: Rig) -> None:
    for seconds, allowed in ((5.0, 0.01), (0.02, 0.002), (5.0, 0.002), (5.0, 0.01)):
        rig.step(seconds)
        assert rig.pace._left == pytest.approx(allowed)


def test_a_step_that_other_processes_delayed_leaves_less(rig: Rig) -> None:
    for _ in range(2):
        rig.cpu -= 1.96 * STEP
        rig.step()
    assert rig.pace._left == pytest.approx(0.1 * 0.04 * STEP)


def test_beside_loads_of_kv_it_gets_nothing(rig: Rig) -> None:
    """The tiers have a tenth of their own."""
    rig.is_taken = True
    rig.step()
    rig.load()
    for _ in range(3):
        assert rig.waits.wait(60) and rig.done == 1
        rig.step()
    rig.is_taken = False
    rig.step()
    assert rig.waits.wait(60) and rig.done == 3


def test_loads_wait_for_a_quarter_of_a_minute_in_all_from_their_submission(rig: Rig) -> None:
    """Five of them share it, and the one that follows has no debt to pay."""
    rig.is_taken = True
    for _ in range(5):
        rig.load()
    assert rig.waits.wait(60)
    rig.step(8.0)
    assert rig.waits.wait(60) and rig.done == 3
    last = threading.Event()
    rig.loader.submit(last.set)
    rig.step(8.0)
    assert last.wait(60) and rig.done == 50
    rig.is_taken = False
    for _ in range(2):
        rig.step()
    rig.waits.clear()
    rig.load()
    assert rig.waits.wait(60) and rig.done == 53


def test_when_all_requests_were_aborted_no_step_follows_and_the_load_goes_on(rig: Rig) -> None:
    rig.load()
    assert rig.waits.wait(60) and rig.done == 3
    rig.now += 1.5  # the engine makes no step, and the thread is not notified
    with rig.pace._changed:
        rig.pace._changed.notify_all()
    assert rig.ended.wait(60)


def test_loads_run_in_their_order_and_one_that_raises_does_not_end_the_thread(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[int] = []
    rig.step(num_running=0)
    for number in range(3):
        rig.load(lambda number=number: order.append(1 // number))  # type: ignore[misc]
    last = threading.Event()
    rig.loader.submit(last.set)
    assert last.wait(60) and order == [1, 0]
    assert "a task of the thread 'adapters' failed" in caplog.text


def test_the_seconds_of_a_load_are_those_of_its_work(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    """Tenants pay for them, and not for waits: here 0.4 s of work, and 3 s of a step."""

    def pack(matrices: Any, pause: Callable[[], None]) -> Any:
        for _ in range(4):
            rig.now += 0.1
            rig.done += 1
            pause()
        return SimpleNamespace(nbytes=8)

    content = SimpleNamespace(pairs={})
    monkeypatch.setattr(adapters, "read_adapter", lambda ref, max_rank, pause: content)
    monkeypatch.setattr(adapters, "adapter_matrices", lambda name, content, layers: {})
    table = adapters.AdapterTable(SimpleNamespace(pack=pack, layers={}), 2, 16, clock=lambda: rig.now)  # type: ignore[arg-type]
    table._loader = rig.loader
    loaded = table.load(AdapterRef("a", "id of a", "/nowhere", 4))
    assert rig.waits.wait(60)
    rig.step(3.0, num_running=0)
    assert loaded.result(60)["seconds"] == pytest.approx(0.4)


def test_a_program_ends_while_a_slice_waits() -> None:
    code = (
        "import threading\n"
        "from inflight.runner.adapter_loader import LoaderPace, LoaderThread\n"
        "pace = LoaderPace(lambda: True, lambda: 0.0)\n"  # a clock that stands still: it waits for ever
        "pace.step_done(0.1, 1)\n"
        "loader, begun = LoaderThread(pace), threading.Event()\n"
        "loader.submit(lambda: [begun.set(), loader.pause()])\n"
        "begun.wait(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
