"""Compile the CPU kernels: at install by the build hook, at the first load after an update, or by hand.

    python -m inflight.kernels.cpu.build

needs a C++17 compiler (`CXX`, else g++ or clang++) and writes `_cpu_attention.so` beside this file.  The
library carries a digest of its sources, so that one made of others is known by it, whatever the files'
times.  Imports nothing but the standard library: the build hook runs it where no dependency is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARY", "BuildError", "build", "is_current"]

_HERE = Path(__file__).resolve().parent
LIBRARY = _HERE / "_cpu_attention.so"

# Sources compiled once, and sources compiled for every instruction set.
_ONCE = [_HERE / "cpu_attention.cpp", _HERE / "cpu_ops.cpp", _HERE / "cpu_decoder.cpp"]
_PER_SET = [_HERE / "cpu_kernels.cpp", _HERE / "cpu_ops_kernels.cpp"]

_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]
_WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# Instruction set -> compiler flags; which one runs is decided at run time.
_X86: dict[str, list[str]] = {
    "avx512bf16": [*_AVX512, "-mavx512bf16", "-mavx512vnni"],
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}


class BuildError(RuntimeError):
    """The kernel cannot be compiled here; the message says what is missing."""


def is_current() -> bool:
    """Whether the library is there and made of the sources that are there."""
    return LIBRARY.exists() and (not _sources() or _digest().encode() in LIBRARY.read_bytes())


def build(force: bool = False, announce: Callable[[], None] = lambda: None) -> Path:
    """Compile and link where the library is not current, or anyway with `force`; returns its path.

    Processes that call this at once wait for one of them; that one calls `announce` before it compiles.

    Raises:
        BuildError: no compiler, or it fails (with the end of what it says), or the folder cannot be written.
    """
    if not force and is_current():
        return LIBRARY
    if sys.platform != "linux":
        raise BuildError(f"the CPU kernels are built on Linux only, not on {sys.platform}")
    if not os.access(_HERE, os.W_OK):
        raise BuildError(f"{_HERE} cannot be written")
    compiler = _compiler()
    with _only_one_builds():
        if force or not is_current():
            announce()
            _build(compiler)
    return LIBRARY


def _build(compiler: list[str]) -> None:
    isas = {"portable": [], **(_X86 if platform.machine().lower() in ("x86_64", "amd64") else {})}
    defines = {"cpu_attention": [f'-DINFLIGHT_SOURCES="{_digest()}"']}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_to(name: str, source: Path, flags: list[str]) -> Future[Path]:
            return pool.submit(_compile, compiler, source, Path(folder) / f"{name}.o", flags)

        once = [compile_to(source.stem, source, defines.get(source.stem, [])) for source in _ONCE]
        sets = {
            isa: [compile_to(f"{source.stem}.{isa}", source, [f"-DINFLIGHT_ISA={isa}", *flags]) for source in _PER_SET]
            for isa, flags in isas.items()
        }
        objects = [unit.result() for unit in (*once, *sets.pop("portable"))]
        for units in sets.values():
            # An old compiler may not know a set; the others do.
            with contextlib.suppress(BuildError):
                objects += [unit.result() for unit in units]
        # Under another name first, so that a process that has the old library mapped keeps it.
        linked = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
        try:
            # libstdc++ stays a library of its own: torch has loaded it, and what is used of it is old; of
            # its static twin come references to the C library's newest version.
            _run([*compiler, "-shared", "-o", str(linked), *map(str, objects)])
            linked.replace(LIBRARY)
        finally:
            linked.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_one_builds() -> Iterator[None]:
    """Holds a lock on the folder itself, which leaves no file behind; goes on where there are no locks."""
    import fcntl  # not everywhere, and the build hook reads this file everywhere

    folder = os.open(_HERE, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _sources() -> list[Path]:
    return sorted(file for pattern in ("cpu_*.cpp", "cpu_*.h") for file in _HERE.glob(pattern))


def _digest() -> str:
    """Of the sources and of what they are compiled with."""
    digest = hashlib.sha256(repr((_FLAGS, _X86)).encode())
    for file in _sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"inflight-sources:{digest.hexdigest()[:32]}"


def _compiler() -> list[str]:
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found: install g++ (Debian, Ubuntu: apt install g++) or set CXX")


def _compile(compiler: list[str], source: Path, to: Path, flags: list[str]) -> Path:
    _run([*compiler, *_FLAGS, *_WARNINGS, *flags, "-c", str(source), "-o", str(to)])
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
        print(build(force=True))
    except BuildError as error:
        sys.exit(str(error))
