"""The choice of a runner, and of the threads that it runs on."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from inflight.config import EngineConfig
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.loading.loaded_model import device_of
from inflight.runner.draft_runner import load_draft_runner
from inflight.runner.model_runner import ModelRunner

__all__ = ["ThreadedRunner", "make_runner", "placed"]

_log = logging.getLogger(__name__)


class TwoPartRunner(Protocol):
    """A runner whose step has a part that can run while the previous step is executed."""

    info: Any

    def prepare(self, out: SchedulerOutput) -> Any:
        """Do the part that needs no token of the previous step; `execute` takes the result."""

    def execute(self, out: SchedulerOutput, inputs: Any) -> StepOutput:
        """Do the rest; steps come in order, always in one thread."""

    def forget_steps(self) -> None:
        """Wait for the device, and forget the steps that were launched and not collected."""


class ThreadedRunner:
    """Executes steps in the thread of `device`, so that the next one can be made and prepared meanwhile."""

    num_collected_first = 0  # `prepare` needs no token of the step before

    def __init__(self, runner: TwoPartRunner, device: ThreadPoolExecutor, draft_runner: Any = None) -> None:
        self.draft_runner = draft_runner
        self.runner = runner
        self.info = runner.info
        self._device = device

    def launch(self, out: SchedulerOutput) -> Future[StepOutput]:
        return self._device.submit(self.runner.execute, out, self.runner.prepare(out))

    def collect(self, ticket: Future[StepOutput]) -> StepOutput:
        return ticket.result()

    def forget_steps(self) -> None:
        """Wait for the thread, and forget the steps that were launched and not collected."""
        self._device.submit(self.runner.forget_steps).result()
        if self.draft_runner is not None:
            self.draft_runner.forget_steps()


def placed(config: EngineConfig) -> EngineConfig:
    """`config` with the device that `device="auto"` finds: some defaults follow from it.

    Raises:
        LoadError: there is no such device.
    """
    return msgspec.structs.replace(config, device=device_of(config.device).type)


def make_runner(config: EngineConfig) -> Any:
    """The runner that `model.json` asks for, with the checkpoint loaded: on a GPU, launching never waits.

    Args:
        config: as `placed` returns it, like the one that `make_core` takes.

    Raises:
        LoadError, ConfigError: see `loader.load`.
    """
    draft_runner = load_draft_runner(config, _device_runner)  # before the target's pool, which takes the rest
    runner = _device_runner(config)
    _log.info("steps are launched %s", "ahead of their tokens" if config.launches_ahead else "one at a time")
    if config.launches_ahead and not _on_gpu(config):
        device = ThreadPoolExecutor(1, "device")  # one thread: steps run in the order of their launch
        return ThreadedRunner(runner, device, draft_runner and ThreadedRunner(draft_runner, device))
    runner.draft_runner = draft_runner
    return runner


def _device_runner(config: EngineConfig) -> Any:
    if not _on_gpu(config):
        return ModelRunner(config)
    from inflight.runner.device_runner import DeviceRunner  # graphs and their kernels, which a CPU does not need

    return DeviceRunner(config)


def _on_gpu(config: EngineConfig) -> bool:
    return device_of(config.device).type == "cuda"
