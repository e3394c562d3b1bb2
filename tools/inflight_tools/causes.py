"""Why a server died, in one line."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from inflight_tools.processes import how_it_ended
from inflight_tools.server_log import end_reason

if TYPE_CHECKING:
    from inflight_tools.watch import Death

__all__ = ["OutOfMemory", "cause"]

# What an uncaught C++ exception leaves in the log.
_UNCAUGHT = re.compile(r"terminate called after throwing an instance of '([^']+)'(?:\s+what\(\):\s+(.*))?")
_TOO_LARGE = re.compile(r"array is too big|bad_alloc|bad_array_new_length|length_error")


class OutOfMemory:
    """Whether the kernel has killed processes for lack of memory since this object was made.

    Reads the counters `oom_kill` of this process's control groups, which contain the server, and of the machine.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._counts()

    def grown(self) -> str | None:
        """The file whose counter grew, else None."""
        after = self._counts()
        return next((str(path) for path, count in after.items() if count > self._before.get(path, count)), None)

    def _counts(self) -> dict[Path, int]:
        """By file, the closest control group first."""
        found = {}
        for path in (*self._control_group_files(), self._root / "proc/vmstat"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
                if match:
                    found[path] = int(match[1])
        return found

    def _control_group_files(self) -> list[Path]:
        mounted = self._root / "sys/fs/cgroup"
        found: list[Path] = []
        with contextlib.suppress(OSError):
            for line in (self._root / "proc/self/cgroup").read_text().splitlines():
                number, controllers, path = line.split(":", 2)
                # In a container the path may be the host's, while the group itself is mounted.
                groups = [path.strip("/"), ""]
                if number == "0":
                    found += [mounted / kind / group / "memory.events" for kind in ("", "unified") for group in groups]
                elif "memory" in controllers.split(","):
                    found += [mounted / "memory" / group / "memory.oom_control" for group in groups]
        return found


def cause(death: Death, log: str, out_of_memory: OutOfMemory) -> str:
    """One line on why the server died or had to be ended.

    Args:
        death: what the watch noticed.
        log: the end of the server's log.
        out_of_memory: made when the server was started.
    """
    if death.who == "hung":
        return f"tritonserver hangs: {death.detail}"
    if death.who == "loading":
        return f"{death.detail}: the launch of its stub failed in a way that Triton waits for without end"
    assert death.returncode is not None
    if death.who == "stub":
        who = f"the stub process of model '{death.model}'" if death.model else "the stub process of a model"
        line = f"{who} died ({how_it_ended(death.returncode)}), and its streams would hang"
    else:
        line = f"tritonserver died ({how_it_ended(death.returncode)})"
    known = _explanation(death, log, out_of_memory)
    return f"{line}: {known}" if known else line


def _explanation(death: Death, log: str, out_of_memory: OutOfMemory) -> str:
    assert death.returncode is not None
    number, uncaught = -death.returncode, _UNCAUGHT.findall(log)
    if number == signal.SIGKILL:
        grown = out_of_memory.grown()
        return f"the kernel's out-of-memory killer ended it (oom_kill in {grown} has grown)" if grown else ""
    if number == signal.SIGFPE and death.who == "server":
        return "the known way there is a request for `classification` of an output of strings: Triton divides by zero"
    if number == signal.SIGABRT and uncaught:
        kind, what = uncaught[-1]
        said = f"{what or kind}".strip()
        if _TOO_LARGE.search(said):
            return f"a request declared a tensor too large for any memory, such as a gRPC shape of 2^61 ({said})"
        return said
    return end_reason(log) if death.who == "server" and number <= 0 else ""
