"""Work for a checkpoint that needs no weights."""

from __future__ import annotations

import contextlib
import os
import threading

from inflight.config import EngineConfig

__all__ = ["warm_up"]


def warm_up(config: EngineConfig, idle: bool) -> None:
    """Import what `make_runner` needs for this checkpoint; not transformers, if its packed weights are kept.

    Allocates no weights, touches no device and leaves no thread.  Ignores failed imports: loading reports them.

    Args:
        idle: on idle cores only.  In a thread of its own, since a process cannot raise its priority again.
    """
    thread = threading.Thread(target=_import, args=(config, idle), name="warm-up")
    thread.start()
    thread.join()


def _import(config: EngineConfig, idle: bool) -> None:
    if idle:  # not a nice level: a serving engine's threads wait for each other, and only an idle one gives way at once
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(Exception):
        import inflight.runner.pipeline
        from inflight.loading.startup import is_kept

        if is_kept(config):
            return
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        import inflight.loading.loader  # noqa: F401
        from inflight.loading.checkpoint.checkpoint_config import read_config

        model_config = read_config(config)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]  # imports the module of its class
        get_checkpoint_conversion_mapping(model_config.model_type)  # compiles hundreds of patterns
