"""The real engine process, with requests that end it: an interpreter for `python_executable`.

A request is poison if its prompt begins with the token id RAISES; it acts in the first step that computes its third
output token or a later one: it raises what a broken device does, and no step survives that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

RAISES = 1002
_AFTER = 2  # output tokens


def write_interpreter(folder: Path) -> Path:
    """An executable file that runs this program."""
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    interpreter.chmod(0o755)
    return interpreter


def _check(prompts: dict[int, tuple[int, int]], out: Any) -> None:
    """End the process if the step has poison in it; `prompts` has the first token and the length by slot."""
    for row in out.new_rows:
        prompts[row.slot] = int(np.frombuffer(row.token_ids, np.int32)[0]), row.num_prompt_tokens
    for slot, computed, count in zip(out.slots, out.num_computed_tokens, out.num_scheduled_tokens):
        first, length = prompts[slot]
        if first == RAISES and computed + count >= length + _AFTER:
            raise RuntimeError("CUDA error: device-side assert triggered")


def main() -> None:
    """Run `-c PROGRAM inflight.worker FOLDER ...` as Python would, with a runner that looks for poison."""
    _, _, program, *arguments = sys.argv
    sys.path.insert(0, str(Path(arguments[1]).parent))
    from inflight.engine.pulse import PulsingRunner

    launch = PulsingRunner.launch
    prompts: dict[int, tuple[int, int]] = {}

    def checked_launch(runner: Any, out: Any) -> Any:
        runner._pulse.launched(out)  # as it is when the step runs
        _check(prompts, out)
        return launch(runner, out)

    PulsingRunner.launch = checked_launch  # type: ignore[method-assign]
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
