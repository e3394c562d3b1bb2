"""Loading tells its progress."""

from __future__ import annotations

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
