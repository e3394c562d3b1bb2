"""The real engine process, with requests that end it: an interpreter for `python_executable`.

The first token of a request's prompt selects its fault in the first step that computes its third output token or a
later one:

    RAISES  raises the error of a broken device; no step survives that
    DIES    kills the process, once: in the step that computes as many output tokens as the second token's number
    NANS    its logits are NaN
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

RAISES, DIES, NANS = 1002, 1003, 1004
_AFTER = 2  # output tokens


def write_interpreter(folder: Path) -> Path:
    """An executable file that runs this program."""
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} "$@"\n')
    interpreter.chmod(0o755)
    return interpreter


class _Faults:
    """The faults of the requests in the batch.

    Args:
        folder: records that the process has died.
    """

    def __init__(self, folder: Path) -> None:
        self._died = folder / "died"
        self._sample: Any = None  # the runner's own
        self._prompts: dict[int, tuple[list[int], int]] = {}  # by slot: the first two tokens, and the length

    def check(self, out: Any) -> None:
        """End the process if the step contains poison."""
        for row in out.new_rows:
            first = np.frombuffer(row.token_ids, np.int32)[:2].tolist()
            self._prompts[row.slot] = first, row.num_prompt_tokens
        for slot, computed, count in zip(out.slots, out.num_computed_tokens, out.num_scheduled_tokens):
            (first, *others), length = self._prompts[slot]
            if first == RAISES and computed + count >= length + _AFTER:
                raise RuntimeError("CUDA error: device-side assert triggered")
            if first == DIES and computed + count >= length + others[0] and not self._died.exists():
                self._died.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def spoil_logits(self) -> None:
        """Make the logits of poisoned rows NaN from now on.  Imports torch: call it after the engine has done so."""
        from inflight.runner.model_runner import ModelRunner

        def spoilt(runner: Any, out: Any, inputs: Any, logits: Any, sampling: Any, slots: Any, positions: Any) -> Any:
            self._spoil(logits, slots, positions)
            return self._sample(runner, out, inputs, logits, sampling, slots, positions)

        if self._sample is None:
            self._sample, ModelRunner._sample = ModelRunner._sample, spoilt  # type: ignore[method-assign]

    def _spoil(self, logits: Any, slots: Any, positions: Any) -> None:
        """`slots` and `positions`: of the rows of `logits`."""
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            (first, *_), length = self._prompts.get(slot, ([0], 0))
            if first == NANS and position >= length + _AFTER:
                logits[row] = float("nan")


def main() -> None:
    """Run `-c PROGRAM inflight.worker FOLDER ...` as Python would, with a runner that looks for poison."""
    _, folder, _, program, *arguments = sys.argv
    sys.path.insert(0, str(Path(arguments[1]).parent))
    from inflight.engine.heartbeat_listener import HeartbeatListener

    faults, step_made = _Faults(Path(folder)), HeartbeatListener.step_made

    def checked(listener: Any, out: Any) -> None:
        faults.spoil_logits()
        step_made(listener, out)  # as it is when the step runs
        faults.check(out)

    HeartbeatListener.step_made = checked  # type: ignore[method-assign]
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
