"""tests/gpu on the image of a machine with a GPU: pytest without our plugins, this repository not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import count_gpus, environment

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))

# A plugin of pytest that claims there is a GPU, so that the modules are imported, and hides packages.
PLAIN_IMAGE = """
import importlib.metadata, sys

import torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, *args)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
version = importlib.metadata.version
def no_version_of_ours(name):
    if name == "inflight":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = no_version_of_ours
"""


def collect(tmp_path: Path, *hidden: str) -> subprocess.CompletedProcess[str]:
    """`pytest --collect-only tests/gpu` without these packages and without any plugin."""
    (tmp_path / "plain_image.py").write_text(PLAIN_IMAGE.format(hidden=set(hidden)))
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "plain_image"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tmp_path)}
    return subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.nightly
def test_all_files_are_collected_without_our_plugins(tmp_path: Path) -> None:
    done = collect(tmp_path, "pytest_asyncio", "pytest_timeout", "xdist", "hypothesis", "tritonclient")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name in FILES if f"tests/gpu/{name}::" not in done.stdout] == []


@pytest.mark.nightly
def test_without_msgspec_they_say_what_to_do(tmp_path: Path) -> None:
    done = collect(tmp_path, "msgspec")
    assert done.returncode == 4
    assert "pip install --target DIR msgspec" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("has_gpu", "cores", "threads", "interpreted"),
    [(False, 16, "1", True), (True, 16, "8", False), (True, 4, "4", False)],
)
def test_threads_and_interpreter(has_gpu: bool, cores: int, threads: str, interpreted: bool) -> None:
    values = environment(has_gpu, cores)
    assert values["OMP_NUM_THREADS"] == threads
    assert ("TRITON_INTERPRET" in values) is interpreted


_DRIVER = """
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
"""


@pytest.mark.parametrize(("result", "count"), [(0, 2), (100, 0)], ids=["works", "no device"])
def test_the_driver_counts_gpus(result: int, count: int, tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(_DRIVER.replace("INIT", str(result)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert count_gpus(str(library)) == count


def test_without_a_driver_there_is_no_gpu() -> None:
    assert count_gpus("libnosuchdriver.so.1") == 0
