"""A spare process works for its forks, reads vocabularies on idle cores, and opens no device."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from panics import Panic

from inflight import worker
from inflight.config import EngineConfig
from inflight.grammars import demand
from inflight.loading import startup
from inflight.runner import warm_up

CONFIG = EngineConfig.from_dict({"model": "m", "speculative_config": {"model": "d", "kv_cache_memory": "1MiB"}})


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """The work that `heat` has left; grammars are used."""
    found: list[Callable[[], object]] = []
    monkeypatch.setattr(startup, "_later", found)
    monkeypatch.setattr(demand, "_page", bytearray(b"\1"))
    return found


def test_a_vocabulary_is_read_on_idle_cores_and_the_process_keeps_its_priority(later: list) -> None:
    before, found = os.sched_getscheduler(0), list[int]()
    later.append(lambda: found.append(os.sched_getscheduler(0)))
    warm_up.warm_up_further()
    warm_up.warm_up_further()
    assert (found, os.sched_getscheduler(0)) == ([os.SCHED_IDLE], before)


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_a_vocabulary_that_cannot_be_read_ends_no_spare_process(later: list, error: type[BaseException]) -> None:
    done: list[int] = []

    def failing() -> None:
        raise error("no such merge")

    later[:] = [lambda: done.append(1), failing]
    startup.heat_further()
    assert done == [1] and not later


def test_a_spare_process_asks_for_no_device_of_a_gpu_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for its draft model."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))
    asked: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(startup, "device_of", lambda name: asked.append(name) or torch.device("cpu"))
    monkeypatch.setattr(startup, "is_kept", lambda config: True)
    warm_up.warm_up(CONFIG, False, lambda config: asked.append("a run"))
    assert warm_up.draft_to_heat(CONFIG) is None
    assert not asked


def test_a_spare_process_reads_the_vocabulary_beside_its_forks(later: list, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def serve_forks(
        control: object,
        prepare: Callable[[], object],
        is_outdated: Callable[[], bool],
        can_do_more: Callable[[], bool],
        do_more: Callable[[], object],
    ) -> None:
        prepare()
        assert not is_outdated() and can_do_more()
        assert not done, "no fork waits for it"
        do_more()
        assert done == ["read"] and not can_do_more()

    monkeypatch.setattr(warm_up, "warm_up", lambda *_: later.append(lambda: done.append("read")))
    monkeypatch.setattr(worker, "serve_forks", serve_forks)
    monkeypatch.setattr(worker, "_name", lambda name: None)
    with socket.socket() as control:
        worker._fork_server(control, CONFIG, idle=False)
    assert done


def test_nothing_is_read_that_no_request_has_asked_for(later: list, monkeypatch: pytest.MonkeyPatch) -> None:
    later.append(lambda: None)
    assert warm_up.can_warm_up_further()
    monkeypatch.setattr(demand, "_page", bytearray(1))
    assert not warm_up.can_warm_up_further()
