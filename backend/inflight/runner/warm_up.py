"""Work for a checkpoint that its engine processes share: imports, and weights that are kept."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import msgspec

from inflight.config import EngineConfig
from inflight.device.deferred_torch import import_torch
from inflight.loading.saved.prefetch import prefetch

__all__ = ["can_warm_up_further", "draft_to_heat", "warm_up", "warm_up_further"]


def warm_up(config: EngineConfig, idle: bool, run: Callable[[EngineConfig], object]) -> None:
    """Import what `make_runner` needs for this checkpoint; not transformers, if its packed weights are kept.

    Those are mapped and tried.  Allocates no other weights, touches no device and leaves no thread.  Ignores failures:
    loading reports them.

    Args:
        idle: on idle cores only.
        run: runs a model that is kept, once, on the threads that its options say.
    """
    _in_a_thread(lambda: _warm_up(config, run), idle)


def can_warm_up_further() -> bool:
    """Whether forks need more by now."""
    from inflight.loading.startup import can_heat_further

    return can_heat_further()


def warm_up_further() -> None:
    """Do the rest, which forks did not need at first; on idle cores only: an engine runs by now."""
    from inflight.loading.startup import heat_further

    _in_a_thread(heat_further, idle=True)


def draft_to_heat(config: EngineConfig) -> EngineConfig | None:
    """The options that the draft model of `config` is loaded with, if a spare can map it.  Touches no device."""
    from inflight.loading.startup import may_heat
    from inflight.runner.draft_runner import draft_config

    with contextlib.suppress(Exception):  # loading reports it
        return draft_config(config) if may_heat(config) else None
    return None


def _in_a_thread(work: Callable[[], object], idle: bool) -> None:
    """Do it in a thread, which has ended when this returns: a process cannot raise its own priority again."""

    def begin() -> None:
        if idle:  # not a nice level: a serving engine's threads wait for each other; only an idle one gives way at once
            with contextlib.suppress(OSError):  # a sandbox may not have it
                os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        work()

    thread = threading.Thread(target=begin, name="warm-up")
    thread.start()
    thread.join()


def _warm_up(config: EngineConfig, run: Callable[[EngineConfig], object]) -> None:
    prefetch(config)  # a thread inherits the class of the one that starts it
    import_torch()
    from inflight.loading.startup import heat, is_kept

    with contextlib.suppress(Exception):
        kept = is_kept(config)
        draft = draft_to_heat(config) if kept else None
        kept = kept and (draft is None or is_kept(draft))
        if heat(config) and (draft is None or heat(draft, grammars=False)):
            # Threads of a product would be missing in a fork, which believes that they wait for it.
            run(
                msgspec.structs.replace(config, device="cpu", cpu_threads=1, async_scheduling=False, itl_target_ms=None)
            )
        if kept:
            return
    with contextlib.suppress(Exception):
        _import(config)


def _import(config: EngineConfig) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import inflight.loading.loader  # noqa: F401
    from inflight.loading.checkpoint.checkpoint_config import read_config

    model_config = read_config(config)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]  # imports the module of its class
    get_checkpoint_conversion_mapping(model_config.model_type)  # compiles hundreds of patterns
