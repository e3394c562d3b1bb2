"""KV events of an engine with a real model, without Triton."""

from __future__ import annotations

import gc
import re
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_events_rig import Ear

from inflight import LLM, SamplingParams
from inflight.config import ConfigError, EngineConfig
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import EngineFailed
from inflight.engine.tiers.tiers import Tiers
from inflight.in_process import local_engine
from inflight.worker import _load

DEMO = str(Path(__file__).parents[3] / "model_repository/demo/1/checkpoint")
SMALL = {"kv_cache_memory": "4MiB", "max_model_len": 256, "check_on_load": False}


def test_prompt_and_answer_are_told_with_their_tokens(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    prompt = [*range(10, 60)]
    with closing(Ear(endpoint)) as ear:
        llm = LLM(DEMO, **SMALL, kv_events_config={"enable_kv_cache_events": True, "endpoint": endpoint})
        try:
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
            said = [*prompt, *output.outputs[0].token_ids]
            full = (len(said) - 1) // 16  # the last token is never computed
            ear.hear_until(lambda: len(ear.knows.blocks) == full)
            prefixes = [ear.knows.prefix_of(block) for block in ear.knows.blocks]
            assert sorted(map(len, prefixes)) == [16 * (index + 1) for index in range(full)]
            assert all(prefix == said[: len(prefix)] for prefix in prefixes)
        finally:
            llm.close()
        ear.hear_until(lambda: not ear.knows.blocks)


def test_an_address_that_cannot_be_had_fails_before_the_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: EngineConfig) -> None:
        raise AssertionError("it is loaded")

    monkeypatch.setattr(local_engine, "make_runner", load)
    monkeypatch.setattr("inflight.runner.pipeline.make_runner", load)
    options = {"enable_kv_cache_events": True, "endpoint": "5557"}
    message = "kv_events_config.endpoint='5557' is not like tcp://*:5557"
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(DEMO, **SMALL, kv_events_config=options)
    sent: list[EngineFailed] = []
    owner: Any = SimpleNamespace(send=sent.append)
    config = EngineConfig.from_dict({"model": DEMO, "device": "cpu", "kv_events_config": options})
    try:
        assert _load(owner, config, Heartbeat(Heartbeat.create(1), 1)) is None
    finally:
        gc.unfreeze()
    assert message in sent[0].message and sent[0].fatal


@pytest.mark.parametrize("fails", ["make_kv_events", "make_core"])
def test_an_engine_that_cannot_be_made_leaves_nothing(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigError("for this test")

    closed: list[Tiers] = []
    monkeypatch.setattr(local_engine, fails, refuse)
    monkeypatch.setattr(Tiers, "close", lambda tiers: closed.append(tiers))
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    with pytest.raises(ConfigError, match="for this test"):
        LLM(DEMO, **SMALL, kv_events_config=events, kv_tiers=[{"type": "host", "size": "1MiB"}])
    assert len(closed) == 1
    assert "kv-events" not in [one.name for one in threading.enumerate()]
