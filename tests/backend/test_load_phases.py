"""Loading tells its progress."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from offline import make_config
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress

from inflight import load_phases
from inflight.loading.load_errors import LoadError
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
    """Standard error: a terminal, or not; `error` is what each write raises."""

    def __init__(self, terminal: bool = True, error: Exception | None = None) -> None:
        super().__init__()
        self._terminal = terminal
        self._error = error

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        if self._error is not None:
            raise self._error
        return super().write(text)


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def shown(
    monkeypatch: pytest.MonkeyPatch, terminal: bool = True, columns: int = 80, model: str = "/models/demo"
) -> str:
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    with load_phases.show_phases(model):
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
    pieces = shown(monkeypatch, columns=20, model="/models/通义千问").replace("\x1b[K", "").split("\r")
    assert max(cell_len(piece) for piece in pieces) == 19


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False) == ""


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_without_control_sequences_gets_nothing(term: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if term is None:
        monkeypatch.delenv("TERM")
    else:
        monkeypatch.setenv("TERM", term)
    assert shown(monkeypatch) == ""


def test_what_rich_shows_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes permanent lines of what others write."""
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(console=Console(file=stream, force_terminal=True)), load_phases.show_phases("/models/demo"):
        load_phases.enter_phase("reading the weights")
    assert "loading" not in stream.getvalue()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")])
def test_a_terminal_that_is_gone_neither_fails_a_load_nor_hides_its_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Stream(error=error))
    with pytest.raises(LoadError, match="the real one"), load_phases.show_phases("/models/demo"):
        load_phases.enter_phase("reading the weights")
        raise LoadError("the real one")


def test_standard_error_may_be_closed_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Stream()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr("sys.stderr", stream)
        with load_phases.show_phases("/models/demo"):
            load_phases.enter_phase("reading the weights")


def test_a_program_that_takes_the_messages_gets_them_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="inflight.load_phases"):
        assert shown(monkeypatch) == ""
    assert caplog.messages == ["reading the weights", "after the load"]
