"""Prints the files with nightly tests that CI should run for a change, or nothing; the reason goes to stderr.

The change is what the branch adds to origin/main.  On main itself it is what came in the last 24 hours, because the
nightly run of `make test-all` has seen the rest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "mark." + "nightly"
GPU = "tests/gpu/"  # its conftest.py marks the tests
MOST_ROOMS = 3  # a change that touches more is one for `make test-all`

# For each room of the repository: the nightly tests that a change of it can break.
ROOMS = {
    ".ci/sanitize": ["tests/backend/kernels/test_cpu_sanitized.py"],
    "backend/inflight/adapters/": [
        "tests/backend/runner/test_adapters.py",
        "tests/e2e/test_adapters.py",
        "tests/e2e/test_adapters_real_model.py",
        "tests/gpu/test_gpu_lora.py",
        "tests/real_model/test_tiers.py",
    ],
    "backend/inflight/attention/": [
        "tests/backend/kernels",
        "tests/backend/attention",
        "tests/gpu/test_gpu_attention.py",
    ],
    "backend/inflight/device/": ["tests/backend/loading", "tests/backend/runner"],
    "backend/inflight/engine/": [
        "tests/backend/engine",
        "tests/backend/runner/test_kv_tiers.py",
        "tests/backend/runner/test_tiers_meet.py",
        "tests/backend/test_speculation.py",
        "tests/real_model",
    ],
    "backend/inflight/frontend/": ["tests/backend/frontend", "tests/e2e"],
    "backend/inflight/gguf/": [
        "tests/backend/gguf",
        "tests/real_model",
        "tests/e2e/test_demo.py",
        "tests/e2e/test_gguf_reload.py",
    ],
    "backend/inflight/grammars/": ["tests/backend/grammars"],
    "backend/inflight/hub.py": ["tests/backend/test_hub.py"],
    "backend/inflight/in_process/": ["tests/backend/in_process"],
    "backend/inflight/kernels/": [
        "tests/backend/kernels",
        "tests/real_model",
        "tests/gpu/test_gpu_attention.py",
        "tests/gpu/test_gpu_device_runner.py",
        "tests/gpu/test_gpu_engine.py",
        "tests/gpu/test_gpu_experts.py",
        "tests/gpu/test_gpu_fp8.py",
        "tests/gpu/test_gpu_int4.py",
        "tests/gpu/test_gpu_lora.py",
        "tests/gpu/test_gpu_switches.py",
    ],
    "backend/inflight/loading/": [
        "tests/backend/loading",
        "tests/backend/emulated/test_adapters_on_a_card.py",
        "tests/backend/test_hot_spare.py",
        "tests/e2e/test_kept_weights.py",
        "tests/backend/runner/test_parity.py",
        "tests/gpu/test_gpu_fp8.py",
        "tests/gpu/test_gpu_int4.py",
        "tests/gpu/test_gpu_switches.py",
        "tests/real_model",
    ],
    "backend/inflight/ops/": ["tests/backend/kernels"],
    "backend/inflight/runner/": [
        "tests/backend/runner",
        "tests/backend/emulated",
        "tests/gpu/test_gpu_kv_tiers.py",
        "tests/e2e/test_kept_chats.py",
        "tests/e2e/test_kv_tiers.py",
        "tests/gpu/test_gpu_device_runner.py",
        "tests/gpu/test_gpu_graphs.py",
        "tests/real_model",
    ],
    "backend/inflight/sampling/": [
        "tests/backend/sampling",
        "tests/backend/kernels",
        "tests/gpu/test_gpu_device_runner.py",
        "tests/gpu/test_gpu_engine.py",
    ],
    "bench/": ["tests/bench"],
    "client/": ["tests/client"],
    "README.md": ["tests/e2e/test_doc_snippets.py"],
    "deploy/": ["tests/deploy", "tests/e2e/test_kubernetes.py"],
    "docs/": ["tests/test_docs.py", "tests/test_snippets.py", "tests/e2e/test_doc_snippets.py"],
    "gateway/": [
        "tests/gateway",
        "tests/e2e/test_fleet.py",
        "tests/e2e/test_handover.py",
        "tests/e2e/test_handover_peer.py",
        "tests/e2e/test_prefill_proxies.py",
        "tests/e2e/test_pooling.py",
        "tests/e2e/test_openai_clients.py",
        "tests/clients",
    ],
    "loadtest/": ["tests/loadtest", "tests/e2e/test_soak.py"],
    "hatch_build.py": ["tests/backend/test_packaging.py"],
    "model_repository/": ["tests/tools/test_demo_checkpoint.py"],
    "pyproject.toml": ["tests/backend/test_packaging.py"],
    "tests/gpu/": ["tests/bench/test_gpu_tests.py", "tests/gpu"],
    "tools/": ["tests/tools"],
}


def git(*arguments: str) -> str:
    """The output of a git command, or an empty string if it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def base() -> str:
    """The commit that the change is compared with; none in a clone without history."""
    head, fork = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main")
    if fork and fork != head:
        return fork
    return git("rev-list", "-1", "--before=24 hours ago", "HEAD") or git("rev-parse", "--verify", "--quiet", "HEAD~1")


def rooms_of(changed: list[str]) -> list[str]:
    """The rooms with a changed file."""
    return [room for room in ROOMS if any(path.startswith(room) for path in changed)]


def files_for(changed: list[str]) -> list[str]:
    """Files with nightly tests that a change should run: of its rooms, and changed test files."""
    rooms = rooms_of(changed)
    if len(rooms) > MOST_ROOMS:
        return []
    chosen = (*changed, *(path for room in rooms for path in ROOMS[room]))
    return [path for path in marked() if path.startswith(chosen)]


def marked() -> list[str]:
    """The test files with a nightly test, as paths from the root of the repository."""
    files = (ROOT / "tests").glob("**/test_*.py")
    paths = {str(path.relative_to(ROOT)): path for path in files}
    return sorted(name for name, path in paths.items() if name.startswith(GPU) or MARK in path.read_text("utf-8"))


def main() -> int:
    start = base()
    changed = git("diff", "--name-only", start, "HEAD").splitlines() if start else []
    rooms = rooms_of(changed)
    print(f"CI: rooms changed since {start[:9] or 'no commit'}: {', '.join(rooms) or 'none'}", file=sys.stderr)
    if len(rooms) > MOST_ROOMS:
        print("CI: no nightly tests for a change of this size: run make test-all", file=sys.stderr)
    print(*files_for(changed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
