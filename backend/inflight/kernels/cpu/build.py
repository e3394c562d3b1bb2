"""Compile the CPU kernels: at install by the build hook, at the first load after an update, or by hand.

    python -m inflight.kernels.cpu.build

requires a C++17 compiler (`CXX`, else g++ or clang++) and writes `_cpu_kernels.so` next to this file.  The
library contains a digest of its sources, which tells whether it is current regardless of file times.
Imports only the standard library: the build hook runs this file before any dependency is installed.
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
LIBRARY = _HERE / "_cpu_kernels.so"

# Sources compiled once, and sources compiled for each instruction set.
_ONCE = [
    _HERE / f"{name}.cpp"
    for name in (
        "cpu_library",
        "cpu_attention",
        "cpu_ops",
        "cpu_pack",
        "cpu_lora_pack",
        "cpu_decoder",
        "cpu_encoder",
        "cpu_sampler",
    )
]
_PER_SET = [_HERE / f"{name}.cpp" for name in ("cpu_attention_kernels", "cpu_ops_kernels", "cpu_sampler_kernels")]

_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]
_WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
# Instruction set -> compiler flags.  The one to use is chosen at run time.
_X86: dict[str, list[str]] = {
    "avx512bf16": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
    "avx512vnni": [*_AVX512, "-mavx512vnni"],
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says what is missing."""


def is_current() -> bool:
    """Whether the library exists and matches the sources."""
    return LIBRARY.exists() and (not _sources() or _digest().encode() in LIBRARY.read_bytes())


def build(force: bool = False, announce: Callable[[], None] = lambda: None) -> Path:
    """Compile and link unless the library is current, or always with `force`; returns its path.

    If several processes call this at the same time, one compiles, after calling `announce`, and the others wait for it.

    Raises:
        BuildError: no compiler, it fails (with the end of its output), or the folder is not writable.
    """
    if not force and is_current():
        return LIBRARY
    if sys.platform != "linux":
        raise BuildError(f"the CPU kernels support Linux only, not {sys.platform}")
    if not os.access(_HERE, os.W_OK):
        raise BuildError(f"{_HERE} is not writable")
    compiler = _compiler()
    with _build_lock():
        if force or not is_current():
            announce()
            _build(compiler)
    return LIBRARY


def _build(compiler: list[str]) -> None:
    isas = {"portable": [], **(_X86 if platform.machine().lower() in ("x86_64", "amd64") else {})}
    defines = {"cpu_library": [f'-DINFLIGHT_SOURCES="{_digest()}"']}
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
            # An old compiler may lack an instruction set.
            with contextlib.suppress(BuildError):
                objects += [unit.result() for unit in units]
        # Link under another name, then rename: processes that have mapped the old library keep it.
        linked = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
        try:
            # libstdc++ is linked dynamically: torch has loaded it, and only old symbols are used.  Linked
            # statically, it would require the newest C library.
            _run([*compiler, "-shared", "-o", str(linked), *map(str, objects)])
            linked.replace(LIBRARY)
        finally:
            linked.unlink(missing_ok=True)


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """Hold a lock on the folder itself, which leaves no file behind; no lock where the file system has none."""
    import fcntl  # missing on Windows, where the build hook loads this file, too

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
    """Digest of the sources and the compiler flags."""
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
