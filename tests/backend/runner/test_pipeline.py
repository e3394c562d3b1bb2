"""The device decides some defaults: the same for the engine and for what runs its steps."""

from __future__ import annotations

import logging

import pytest
import torch
from checkpoints import make_checkpoint
from engine_rig import Info, PagedHashRunner

from inflight.config import EngineConfig
from inflight.engine.assembly import make_core, make_parts
from inflight.engine.scheduler import SchedulerLimits
from inflight.loading.load_errors import LoadError
from inflight.runner.model_runner import ModelRunner
from inflight.runner.pipeline import ThreadedRunner, make_runner, placed


def config_of(**options: object) -> EngineConfig:
    return EngineConfig.from_dict({"model": "m", **options})


@pytest.mark.parametrize(
    ("device", "has_card", "option", "ahead"),
    [
        ("auto", True, "auto", True),
        ("auto", False, "auto", False),
        ("cpu", True, "auto", False),
        ("cuda", True, "auto", True),
        ("auto", True, False, False),
        ("auto", False, True, True),
    ],
)
def test_steps_are_launched_ahead_on_a_gpu_unless_the_option_decides(
    monkeypatch: pytest.MonkeyPatch, device: str, has_card: bool, option: bool | str, ahead: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    config = placed(config_of(device=device, async_scheduling=option))
    assert config.launches_ahead is ahead
    assert config.device == ("cuda" if has_card and device != "cpu" else "cpu")
    assert placed(config) == config


def test_a_step_has_more_tokens_on_a_gpu_unless_the_option_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_card, expected in ((True, 8192), (False, 2048)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_card=has_card: has_card)
        assert placed(config_of()).step_tokens == expected
        assert placed(config_of(device="cpu")).step_tokens == 2048
        assert placed(config_of(max_num_batched_tokens=99)).step_tokens == 99
        limits = SchedulerLimits(256, expected)
        assert make_parts(placed(config_of()), PagedHashRunner(Info(), 16, 256)).scheduler.limits == limits


def test_a_missing_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match='device="cuda", but torch finds no CUDA device'):
        placed(config_of(device="cuda"))


def test_runner_core_and_log_agree(tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("pipeline"))
    caplog.set_level(logging.INFO, logger="inflight")
    for option, kind, text in (("auto", ModelRunner, "one at a time"), (True, ThreadedRunner, "ahead of their tokens")):
        config = placed(config_of(model=path, device="cpu", async_scheduling=option, num_gpu_blocks_override=64))
        runner = make_runner(config)
        assert type(runner) is kind
        assert make_core(config, runner)._max_launched == (2 if config.launches_ahead else 1)
        assert f"steps are launched {text}" in caplog.messages
        caplog.clear()
