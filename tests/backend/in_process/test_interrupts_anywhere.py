"""An exception at any line of a call leaves an engine that goes on, with the same tokens."""

from __future__ import annotations

import linecache
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import inflight
from inflight import LLM, RequestOutput, SamplingParams
from inflight.engine.integrity import check_core

PACKAGE = Path(inflight.__file__).parent
DEMO = str(Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint")
PROMPTS = ["Return a list of", "Open the file and"]
Place = tuple[str, int]  # of a line: file within the package, number


def trace(call: Callable[[], Any], at_line: Callable[[Place], None]) -> None:
    """Run `call`, and `at_line` before each line of the package that this thread runs."""
    prefix = f"{PACKAGE}/"

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line((frame.f_code.co_filename[len(prefix) :], frame.f_lineno))
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(prefix) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)


def source(file: str, line: int) -> str:
    return linecache.getline(str(PACKAGE / file), line)


class Interrupted:
    """A call of an LLM that can be interrupted before any of its lines."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.llm = LLM(DEMO, dtype="float32", kv_cache_memory="1MiB", max_model_len=64, **options)
        self.expected = self.tokens()

    def tokens(self) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        results: list[RequestOutput] = self.llm.generate(PROMPTS, params, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results]

    def places(self) -> Counter[Place]:
        """The lines that a call runs, and how often it does.

        Lines that take and release a lock of C are left out: no signal is handled before it is done.
        """
        found: Counter[Place] = Counter()
        trace(self.tokens, lambda place: found.update([place]))
        return Counter({place: times for place, times in found.items() if "with self._mutex:" not in source(*place)})

    def check(self, place: Place, number: int) -> None:
        """Interrupt the call when it comes to a line for the given time, and call again."""
        left = number

        def at_line(reached: Place) -> None:
            nonlocal left
            left -= reached == place
            if reached == place and not left:
                raise KeyboardInterrupt

        where = f"{place}, time {number}"
        with pytest.raises(KeyboardInterrupt):
            trace(self.tokens, at_line)
            pytest.fail(f"not reached: {where}")
        assert self.tokens() == self.expected, where
        assert not self.llm.core.has_work and not self.llm.engine.has_open, where
        check_core(self.llm.core)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where


MODES = pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["plain", "ahead"])


@pytest.mark.parametrize("options", [{"async_scheduling": True}], ids=["ahead"])  # plain ones: `test_at_every_line`
def test_at_the_lines_between_schedule_and_update(options: dict[str, Any]) -> None:
    """Those of the core and of the turn around it, in the last step that runs them."""
    call = Interrupted(options)
    with call.llm:
        places = {place: times for place, times in call.places().items() if place[0] in STEP}
        assert {file for file, _ in places} == STEP
        for place, times in sorted(places.items()):
            call.check(place, times)


STEP = {"engine/core.py", "in_process/local_engine.py", "in_process/turns.py"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@MODES
def test_at_every_line(options: dict[str, Any]) -> None:
    call = Interrupted(options)
    with call.llm:
        for place, times in sorted(call.places().items()):
            for number in {1, times // 2 + 1, times}:
                call.check(place, number)
