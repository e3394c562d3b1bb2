"""Steps of which the host waits for nothing: sampled tokens stay on the device, and a pinned ring brings them back.

    launch    host     apply the step to the batch state; write rows, blocks, columns to a pinned buffer
              device   copy | make_inputs -> forward -> sample -> put_tokens | copy of the tokens to the ring, event
    collect   host     wait for the event; tokens to the batch state and into the `StepOutput`

One thread launches step n + 1 while step n runs.  Its positions come from the schedule, and its input tokens from
`DeviceState.token_ids`, where step n leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inflight.attention.base import AttentionMetadata
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.runner.step_inputs import StepSize
from inflight.sampling import SamplingMetadata

__all__ = ["DeviceRunner", "DeviceStep"]


@dataclass(slots=True)
class DeviceStep:
    """What `DeviceRunner.compute` takes: tensors whose contents are there once `upload.copy()` has run, and host ints.

    With equal `size`, lines, new_blocks, `sampling.columns` and all tensors of `metadata` have equal addresses.

    Attributes:
        size: of all tensors; what a graph is chosen by.
        lines: int32 [len(Line), >= size.rows + 1].
        new_blocks: int32 [at least size.rows].
        new_tokens: int32; empty unless requests enter or drafts come: then its address varies.
        metadata: its tensors are views of `lines` and of `StepInputTensors`.
        sampling: for `size.logits` rows.
    """

    size: StepSize
    lines: Tensor
    new_blocks: Tensor
    new_tokens: Tensor
    metadata: AttentionMetadata
    sampling: SamplingMetadata


class DeviceRunner:
    """Implements `Runner` (engine/core.py)."""

    def launch(self, out: SchedulerOutput) -> Any:
        """Launch a step; waits for nothing on the device."""

    def collect(self, ticket: Any) -> StepOutput:
        """Wait for this step's tokens, and for nothing launched behind it."""

    def size_of(self, rows: int, tokens: int, logits: int, out: SchedulerOutput) -> StepSize:
        """The sizes to launch a step with: its own; graphs replace this to choose a bucket."""

    def compute(self, step: DeviceStep) -> Tensor:
        """make_inputs, forward, sample, put_tokens; int64 [size.logits] tokens.

        Works only on tensors at fixed addresses and host ints, so that it can be captured: `execute` is what `launch`
        calls, which is this or a replay.
        """
