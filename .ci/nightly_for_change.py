"""Prints the paths whose tests marked `nightly` a change should run, or nothing; what it decides goes to stderr.

The change is what the branch adds to origin/main.  On main itself it is what came in the last 24 hours, because the
nightly run of `make test-all` has seen the rest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MOST_ROOMS = 3  # a change that touches more is one for `make test-all`

# A room of the repository: where the nightly tests are that a change of it can break.
ROOMS = {
    "backend/inflight/attention/": ["tests/backend/kernels", "tests/backend/attention"],
    "backend/inflight/engine/": ["tests/backend/engine", "tests/backend/test_speculation.py"],
    "backend/inflight/frontend/": ["tests/backend/frontend", "tests/e2e"],
    "backend/inflight/grammars/": ["tests/backend/grammars"],
    "backend/inflight/kernels/": ["tests/backend/kernels"],
    "backend/inflight/loading/": ["tests/backend/loading", "tests/backend/runner/test_parity.py"],
    "backend/inflight/ops/": ["tests/backend/kernels"],
    "backend/inflight/runner/": ["tests/backend/runner"],
    "backend/inflight/sampling/": ["tests/backend/sampling", "tests/backend/kernels"],
    "bench/": ["tests/bench"],
    "client/": ["tests/client"],
    "deploy/": ["tests/deploy", "tests/e2e/test_kubernetes.py"],
    "gateway/": ["tests/gateway", "tests/e2e/test_fleet.py", "tests/e2e/test_openai_clients.py"],
    "loadtest/": ["tests/loadtest", "tests/e2e/test_soak.py"],
    "hatch_build.py": ["tests/backend/test_packaging.py"],
    "model_repository/": ["tests/tools/test_demo_checkpoint.py"],
    "pyproject.toml": ["tests/backend/test_packaging.py"],
    "tests/gpu/": ["tests/bench/test_gpu_tests.py"],
    "tools/": ["tests/tools"],
}


def git(*arguments: str) -> str:
    """What a git command prints, or nothing if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def base() -> str:
    """The commit that the change is compared with; none in a clone without history."""
    head, fork = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main")
    if fork and fork != head:
        return fork
    return git("rev-list", "-1", "--before=24 hours ago", "HEAD") or git("rev-parse", "--verify", "--quiet", "HEAD~1")


def rooms_of(changed: list[str]) -> list[str]:
    """The rooms with a changed file."""
    return [room for room in ROOMS if any(path.startswith(room) for path in changed)]


def paths_for(changed: list[str]) -> list[str]:
    """Where the nightly tests of a change are: those of its rooms, and test files that changed themselves."""
    rooms = rooms_of(changed)
    files = [path for path in changed if re.fullmatch(r"tests/.*/test_\w+\.py", path) and Path(path).exists()]
    found = {*files, *(path for room in rooms for path in ROOMS[room])} if len(rooms) <= MOST_ROOMS else set()
    return sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def main() -> int:
    start = base()
    changed = git("diff", "--name-only", start, "HEAD").splitlines() if start else []
    rooms, paths = rooms_of(changed), paths_for(changed)
    print(f"CI: {len(rooms)} rooms have changed since {start[:9] or 'never'}", file=sys.stderr)
    if len(rooms) > MOST_ROOMS:
        print("CI: no nightly tests for a change of this size: run make test-all", file=sys.stderr)
    print(*paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
