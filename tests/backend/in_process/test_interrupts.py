"""Interrupts, exceptions and threads leave an engine that goes on, with the same tokens."""

from __future__ import annotations

import _thread
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.engine.integrity import check_core
from inflight.frontend.errors import RequestError
from inflight.in_process.turns import InterruptLater, TurnLock

DEMO = str(Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint")
OPTIONS: dict[str, Any] = dict(dtype="float32", kv_cache_memory="8MiB", max_model_len=128)
PROMPTS = ["Return a list of", "Open the file and", "The default value is", "Raise ValueError if"]
DRAFTS: dict[str, Any] = dict(speculative_config={"model": DEMO, "kv_cache_memory": "8MiB"})


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def token_ids(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module", params=[{}, {"async_scheduling": True}, DRAFTS], ids=["plain", "ahead", "drafts"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(DEMO, **OPTIONS, **request.param) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(DEMO, **OPTIONS) as llm:
        return token_ids(llm.generate(PROMPTS, greedy()))


class Stopped(BaseException):
    """Such as a timeout raised by a signal handler."""


PLACES = {
    "after schedule": ("scheduler", "schedule"),
    "after launch": ("runner", "launch"),
    "after collect": ("runner", "collect"),
    "after update": ("scheduler", "update"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", [1, 3])
def test_an_exception_at_any_place_of_a_step(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    owner, name = PLACES[place]
    target = getattr(llm.core, owner)
    inner: Callable[..., Any] = getattr(target, name)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        result = inner(*arguments)
        calls += 1
        if calls == call:
            raise Stopped
        return result

    other = llm.stream(PROMPTS[3], greedy(60))
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupted)
        with pytest.raises(Stopped):
            llm.generate(PROMPTS, greedy())
    with pytest.raises(RequestError, match="another request's step was interrupted by Stopped: send it again"):
        next(other)
    assert token_ids(llm.generate(PROMPTS, greedy())) == expected
    assert not llm.core.has_work
    check_core(llm.core)


def test_an_interrupt_waits_for_the_end_of_the_step(llm: LLM, expected: list[list[int]]) -> None:
    """Then no request but that of the call is lost, and the prefix cache stays."""
    core = llm.core
    inner = core.runner.launch

    def launch(out: Any) -> Any:
        core.runner.launch = inner  # type: ignore[method-assign]
        _thread.interrupt_main()
        return inner(out)

    other = llm.stream(PROMPTS[3], greedy())
    next(other)
    core.runner.launch = launch  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], greedy())
    assert token_ids(list(other)[-1:]) == expected[3:]
    assert llm.core is core
    assert token_ids(llm.generate(PROMPTS, greedy())) == expected
    check_core(core)


def test_a_second_interrupt_takes_effect_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptLater():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_several_threads(llm: LLM, expected: list[list[int]]) -> None:
    """All submit before the first step; then each waits for its own requests, and steps serve all."""
    found: dict[int, list[list[int]]] = {}
    sizes: list[int] = []
    inner = llm.core.scheduler.schedule
    barrier = threading.Barrier(len(PROMPTS))

    def schedule() -> Any:
        out = inner()
        sizes.append(len(out.slots))
        return out

    def call(index: int) -> None:
        barrier.wait()
        for _ in range(3):
            found.setdefault(index, []).extend(token_ids(llm.generate(PROMPTS[index], greedy())))

    llm.core.scheduler.schedule = schedule  # type: ignore[method-assign]
    try:
        threads = [threading.Thread(target=call, args=[index], daemon=True) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        llm.core.scheduler.schedule = inner  # type: ignore[method-assign]
    assert found == {index: [tokens] * 3 for index, tokens in enumerate(expected)}
    assert max(sizes) > 1, "threads share a batch"
    check_core(llm.core)


def test_turns_go_to_the_thread_that_has_waited_longest() -> None:
    lock, order = TurnLock(), []

    def take(name: str) -> None:
        with lock:
            order.append(name)

    threads = [threading.Thread(target=take, args=[name], daemon=True) for name in "abc"]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._waiting) < count:
                pass
    with lock:
        order.append("again")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "again"]


def test_a_wait_for_a_turn_can_be_interrupted() -> None:
    """Also by a signal that does not end the wait itself: the kernel hands it to another thread here."""
    lock = TurnLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            while not lock._waiting:
                pass
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            done.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    held.wait()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("the lock is held")
    done.set()
    holder.join()
    assert not lock._waiting
    with lock:
        pass


def test_an_interrupt_between_queueing_and_waiting_leaves_no_turn_behind() -> None:
    class Interrupting(deque[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            raise KeyboardInterrupt

    lock = TurnLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    held.wait()
    lock._waiting = Interrupting()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("the lock is held")
    done.set()
    holder.join()
    assert lock._owner is None


class InterruptedGate:
    def __init__(self, gate: Any) -> None:
        self._gate = gate

    def release(self) -> None:
        self._gate.release()
        raise KeyboardInterrupt


class InterruptedQueue(deque[Any]):
    def popleft(self) -> Any:
        super().popleft()
        raise KeyboardInterrupt

    def __getitem__(self, index: Any) -> Any:
        thread, gate = super().__getitem__(index)
        return thread, InterruptedGate(gate)


def test_an_interrupt_while_a_turn_is_passed_on_loses_no_thread() -> None:
    lock, order = TurnLock(), []
    lock._waiting = InterruptedQueue()

    def take(name: str) -> None:
        with contextlib.suppress(KeyboardInterrupt), lock:
            order.append(name)

    threads = [threading.Thread(target=take, args=[name], daemon=True) for name in "ab"]
    with contextlib.suppress(KeyboardInterrupt), lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._waiting) < count:
                pass
    for thread in threads:
        thread.join(60)
    assert order == ["a", "b"] and lock._owner is None and not lock._waiting


@pytest.fixture
def within_a_step(llm: LLM) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Registers what the next step calls, as a signal handler or a finalizer would."""
    inner = llm.core.scheduler.schedule

    def register(action: Callable[[], Any]) -> None:
        def schedule() -> Any:
            llm.core.scheduler.schedule = inner  # type: ignore[method-assign]
            action()
            return inner()

        llm.core.scheduler.schedule = schedule  # type: ignore[method-assign]

    yield register
    llm.core.scheduler.schedule = inner  # type: ignore[method-assign]


def test_a_stream_can_be_collected_as_garbage_in_the_middle_of_a_step(
    llm: LLM, expected: list[list[int]], within_a_step: Callable[[Callable[[], Any]], None]
) -> None:
    """Its request ends, and the thread does not wait for its own turn."""
    streams = [llm.stream(PROMPTS[3], greedy(60))]
    next(streams[0])
    within_a_step(streams.clear)
    assert token_ids(llm.generate(PROMPTS, greedy())) == expected
    assert not llm.core.has_work and not llm.engine.has_open
    check_core(llm.core)


def test_a_signal_handler_that_calls_in_the_middle_of_a_step_is_refused(
    llm: LLM, expected: list[list[int]], within_a_step: Callable[[Callable[[], Any]], None]
) -> None:
    refused = []

    def handler() -> None:
        for call in (lambda: llm.generate(PROMPTS, greedy()), llm.close):
            with pytest.raises(RuntimeError, match="in the middle of its step: call it later"):
                call()
            refused.append(call)

    within_a_step(handler)
    assert token_ids(llm.generate(PROMPTS, greedy())) == expected
    assert len(refused) == 2


def test_a_closed_llm_says_so_and_frees_its_memory() -> None:
    llm = LLM(DEMO, **OPTIONS)
    stream = llm.stream(PROMPTS[0], greedy())
    next(stream)
    model = weakref.ref(llm.core.runner.model)  # type: ignore[attr-defined]
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="was closed"):
        next(stream)
    with pytest.raises(RuntimeError, match="this LLM is closed: make another one"):
        llm.generate(PROMPTS[0])
    gc.collect()
    assert model() is None
    assert repr(llm) == f"LLM({DEMO!r}, closed)"


CTRL_C = """
import asyncio, os, signal, sys, threading
from inflight import LLM, AsyncLLM, SamplingParams
llm = LLM({demo!r}, dtype="float32", kv_cache_memory="16MiB", cpu_threads=1)
expected = llm.generate("Return", SamplingParams(temperature=0.0, max_tokens=9))[0].outputs[0].token_ids
for _ in range(3):
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        while True:
            llm.generate(["Return a list of"] * 4, SamplingParams(max_tokens=200, ignore_eos=True))
    except KeyboardInterrupt:
        pass
    assert llm.generate("Return", SamplingParams(temperature=0.0, max_tokens=9))[0].outputs[0].token_ids == expected
print("whole")
llm.close()
forgotten = AsyncLLM({demo!r}, dtype="float32", kv_cache_memory="16MiB", cpu_threads=1)
async def run():
    return await anext(forgotten.generate("Return", SamplingParams(max_tokens=2000, ignore_eos=True)))
asyncio.run(run())
"""


@pytest.mark.nightly
def test_ctrl_c_in_a_script_and_an_end_with_an_engine_that_still_runs() -> None:
    done = subprocess.run([sys.executable, "-c", CTRL_C.format(demo=DEMO)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
