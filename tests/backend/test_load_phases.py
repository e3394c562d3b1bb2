"""Loading tells its progress."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from offline import make_config

from inflight import load_phases
from inflight.runner.pipeline import make_runner


@pytest.fixture(autouse=True)
def logger() -> Iterator[None]:
    yield
    for name in (load_phases.__name__, "inflight"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [], True
        log.setLevel(logging.NOTSET)


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}], ids=["plain", "int4"])
def test_the_phases_come_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, str]) -> None:
    caplog.set_level(logging.INFO, load_phases.__name__)
    make_runner(make_config(make_checkpoint("llama", tmp_path), **options))
    phases = [record.getMessage() for record in caplog.records if record.name == load_phases.__name__]
    assert list(dict.fromkeys(phases)) == [
        "importing transformers",
        "reading the weights",
        *(["measuring inputs", "quantizing the weights"] if options else []),
        "computing reference logits",
        "packing the weights",
        "checking the logits",
    ]


def test_the_engine_process_prints_them_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    load_phases.enter_phase("nothing is printed unless it is asked for")
    for _ in range(2):
        load_phases.print_phases("/models/100%s real")
    load_phases.enter_phase("reading the weights")
    logging.getLogger("inflight.kernels.registry").info("a detail")
    logging.getLogger("inflight.kernels.registry").warning("no compiler")
    assert capsys.readouterr().err == (
        "inflight: loading 100%s real: reading the weights\ninflight: warning: no compiler\n"
    )


class Stream(io.StringIO):
    """Standard error: a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool = True, columns: int = 80) -> str:
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    with load_phases.show_phases("/models/demo"):
        load_phases.enter_phase("reading the weights")
    load_phases.enter_phase("after the load")
    return stream.getvalue()


def test_a_terminal_shows_the_present_phase_in_one_line_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = logging.getLogger("inflight.load_phases")
    state = (before.level, before.propagate, list(before.handlers))
    lines = ["loading demo: starting", "loading demo: reading the weights", ""]
    assert shown(monkeypatch) == "".join(f"\r\x1b[K{line}\r" for line in lines)
    assert (before.level, before.propagate, list(before.handlers)) == state


def test_a_narrow_terminal_gets_no_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = shown(monkeypatch, columns=20).replace("\x1b[K", "").split("\r")
    assert max(len(piece) for piece in pieces) == 19


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False) == ""


def test_a_program_that_takes_the_messages_gets_them_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="inflight.load_phases"):
        assert shown(monkeypatch) == ""
    assert caplog.messages == ["reading the weights", "after the load"]
