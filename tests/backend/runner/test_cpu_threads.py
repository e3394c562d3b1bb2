"""`cpu_threads` by default: what affinity and the container's quota allow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from offline import make_core

from inflight.config import EngineConfig
from inflight.kernels.cpu import library
from inflight.loading.startup import load_or_reuse, wait_until_kept
from inflight.runner import cpu_threads
from inflight.runner.cpu_threads import available_cpus


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys__fs__cgroup__"
V1 = "sys__fs__cgroup__cpu,cpuacct__"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {V2 + "cpu_dot_max": "200000 100000\n"}, 2),
        ("0::/\n", {V2 + "cpu_dot_max": "250000 100000\n"}, 2),
        ("0::/\n", {V2 + "cpu_dot_max": "50000 100000\n"}, 1),
        ("0::/\n", {V2 + "cpu_dot_max": "max 100000\n"}, 16),
        ("0::/\n", {V2 + "cpu_dot_max": "9900000 100000\n"}, 16),
        ("0::/pod/box\n", {V2 + "pod__cpu_dot_max": "300000 100000", V2 + "pod__box__cpu_dot_max": "max 100000"}, 3),
        ("0::/docker/4711\n", {V2 + "cpu_dot_max": "400000 100000"}, 4),
        (
            "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n",
            {V1 + "box__cpu_dot_cfs_quota_us": "300000\n", V1 + "box__cpu_dot_cfs_period_us": "100000\n"},
            3,
        ),
        (
            "4:cpu,cpuacct:/docker/4711\n",
            {V1 + "cpu_dot_cfs_quota_us": "-1\n", V1 + "cpu_dot_cfs_period_us": "100000\n"},
            16,
        ),
        (
            "4:cpu:/\n",
            {V2 + "cpu__cpu_dot_cfs_quota_us": "600000", V2 + "cpu__cpu_dot_cfs_period_us": "100000"},
            6,
        ),
        ("0::/\n", {V2 + "cpu_dot_max": "nonsense\n"}, 16),
    ],
)
def test_the_quota_limits_the_affinity(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert available_cpus(write(tmp_path, proc__self__cgroup=cgroup, **files)) == expected


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_cpus(tmp_path) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert available_cpus(tmp_path) == 1


@pytest.mark.parametrize(("available", "given", "expected"), [(2, None, 2), (16, None, 3), (2, 5, 5)])
def test_the_runner_takes_no_more_threads_than_that_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, given: int | None, expected: int
) -> None:
    """And no more than torch has already: OMP_NUM_THREADS, or a call of the user's, may have limited it."""
    monkeypatch.setattr(cpu_threads, "available_cpus", lambda: available)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        make_core(make_checkpoint("llama", tmp_path), cpu_threads=given, check_on_load=False)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


FORK = """
import os, sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(2)
from inflight import LLM, SamplingParams
from inflight.kernels.cpu import cpu_linear as linear

def forked(work):
    reader, writer = os.pipe()
    if not os.fork():
        try:
            work()
        except Exception as error:
            os.write(writer, f"{{type(error).__name__}}: {{error}}".encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    print(os.read(reader, 10_000).decode())

llm = LLM({checkpoint!r}, cpu_threads=2, dtype="float32", kv_cache_memory="16MiB")
greedy = SamplingParams(temperature=0.0, max_tokens=4)
before = llm.generate("Return a list of", greedy)[0].outputs[0].text
forked(lambda: llm.generate("x", greedy))
forked(lambda: next(llm.stream("x", greedy)))
forked(lambda: linear.PackedWeight([torch.ones(64, 64)]))
torch.set_num_threads(1)  # then nothing waits for a thread
forked(lambda: linear.linear(torch.ones(2, 64), linear.PackedWeight([torch.ones(64, 64)])))
torch.set_num_threads(2)
assert llm.generate("Return a list of", greedy)[0].outputs[0].text == before, "the parent goes on"
"""
DEMO = str(Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint")


@pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
def test_a_forked_process_says_at_once_that_it_cannot_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))  # the program starts from kept weights, without transformers
    load_or_reuse(EngineConfig.from_dict({"model": DEMO, "device": "cpu", "dtype": "float32"}))
    wait_until_kept()
    path = [str(Path(__file__).parents[3] / name) for name in ("backend", "tools")]
    program = FORK.format(path=path, checkpoint=DEMO)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    generate, stream, kernel, alone = done.stdout.splitlines()
    for line in (generate, stream):
        assert line.startswith("RuntimeError: this LLM belongs to the process that made it")
    assert kernel.startswith("RuntimeError: this process was forked from one that used the CPU kernels")
    assert all("spawn" in line for line in (generate, stream, kernel)), "the way out"
    assert not alone
