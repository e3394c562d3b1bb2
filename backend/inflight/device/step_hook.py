"""What else a forward pass must know of its rows, besides tokens, positions and attention."""

from __future__ import annotations

from typing import Protocol

from inflight.attention.base import AttentionMetadata
from inflight.engine.step import SchedulerOutput

__all__ = ["StepHook"]


class StepHook(Protocol):
    """Prepares the modules of a model that behave differently for each row: `LoadedModel.hooks` lists a model's.

    Attributes:
        capturable: whether the model launches the same for every batch of a size, so that a CUDA graph may contain it.
            The hook then changes the contents of tensors, never their addresses.
    """

    capturable: bool

    def step(self, out: SchedulerOutput, batch: AttentionMetadata) -> None:
        """Called before each forward pass, in the order of steps; a step whose rows fail may come again in parts.

        On a GPU nothing here waits for the device, and what is copied there is ordered behind the step before.
        """
