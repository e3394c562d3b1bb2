"""Compile the CPU attention kernel: at install by the build hook, or by hand.

    python -m inflight.attention.build

needs a C++17 compiler (`CXX`, else g++ or clang++) and writes `_cpu_attention.so` beside this file.
Imports nothing but the standard library: the build hook runs it where no dependency is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARY", "BuildError", "build", "is_current"]

_HERE = Path(__file__).resolve().parent
LIBRARY = _HERE / "_cpu_attention.so"

_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]
_WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# Instruction set -> compiler flags; which one runs is decided at run time.
_X86: dict[str, list[str]] = {
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}


class BuildError(RuntimeError):
    """The kernel cannot be compiled here; the message says what is missing."""


def is_current() -> bool:
    """Whether the library is there and no older than its sources."""
    return LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(file.stat().st_mtime for file in _sources())


def build() -> Path:
    """Compile and link; returns the library's path.

    Raises:
        BuildError: no compiler, or it fails (with the end of what it says).
    """
    if sys.platform != "linux":
        raise BuildError(f"the CPU attention kernel is built on Linux only, not on {sys.platform}")
    compiler = _compiler()
    isas = {**(_X86 if platform.machine().lower() in ("x86_64", "amd64") else {}), "portable": []}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        entry = pool.submit(_compile, compiler, "cpu_attention.cpp", Path(folder) / "entry.o", [])
        kernels = {
            isa: pool.submit(
                _compile, compiler, "cpu_kernels.cpp", Path(folder) / f"{isa}.o", [f"-DINFLIGHT_ISA={isa}", *flags]
            )
            for isa, flags in isas.items()
        }
        objects = [entry.result(), kernels.pop("portable").result()]
        # An old compiler may not know a set; the others do.
        objects += [kernel.result() for kernel in kernels.values() if not isinstance(kernel.exception(), BuildError)]
        # Under another name first, so that a process that has the old library mapped keeps it.
        linked = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
        _run([*compiler, "-shared", "-o", str(linked), *map(str, objects)])
        linked.replace(LIBRARY)
    return LIBRARY


def _sources() -> list[Path]:
    return [*_HERE.glob("cpu_*.cpp"), *_HERE.glob("cpu_*.h")]


def _compiler() -> list[str]:
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found: install g++ (Debian, Ubuntu: apt install g++) or set CXX")


def _compile(compiler: list[str], source: str, to: Path, flags: list[str]) -> Path:
    _run([*compiler, *_FLAGS, *_WARNINGS, *flags, "-c", str(_HERE / source), "-o", str(to)])
    return to


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
