"""Building the kernel: what the install does with a compiler, with an old one, and with none.

The compiler is a stand-in that writes what it was told to write; the real one has built the library
that the other tests run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = """#!{python}
import sys
from pathlib import Path

if "{refused}" in sys.argv:
    sys.exit("error: unrecognized command-line option {refused}")
inputs = [Path(word).stem for word in sys.argv[1:] if word.endswith(".o")]
Path(sys.argv[sys.argv.index("-o") + 1]).write_text(" ".join(sorted(inputs)))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree without the library."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("backend", "client"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def run(tree: Path, compiler: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    environment["PATH"] = str(tree / "empty")
    if compiler is not None:
        environment["CXX"] = compiler
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)


def compiler(tree: Path, refused: str = "nothing") -> str:
    path = tree / "compiler"
    path.write_text(COMPILER.format(python=sys.executable, refused=refused))
    path.chmod(0o755)
    return str(path)


def make_wheel(tree: Path, compiler: str | None) -> tuple[Path, str]:
    pytest.importorskip("hatchling")
    done = run(tree, compiler, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").iterdir()
    return wheel, done.stdout + done.stderr


def test_a_wheel_has_the_library_and_a_platform(tree: Path) -> None:
    wheel, _ = make_wheel(tree, compiler(tree))
    assert "py3-none-linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "inflight/attention/_cpu_attention.so" in names
    assert "inflight/attention/cpu_kernels.cpp" in names, "it can be built again where the wheel is installed"


@pytest.mark.parametrize("missing", [None, "/nowhere/g++"])
def test_without_a_compiler_the_install_goes_on(tree: Path, missing: str | None) -> None:
    wheel, said = make_wheel(tree, missing)
    assert wheel.name.endswith("py3-none-any.whl")
    assert "inflight/attention/_cpu_attention.so" not in zipfile.ZipFile(wheel).namelist()
    assert "without the CPU attention kernel" in said


def test_every_instruction_set_is_linked(tree: Path) -> None:
    done = run(tree, compiler(tree), "backend/inflight/attention/build.py")
    assert done.returncode == 0, done.stderr
    linked = Path(done.stdout.strip()).read_text().split()
    assert {"entry", "portable"} <= set(linked)
    if os.uname().machine == "x86_64":
        assert linked == ["avx2", "avx512", "avx512bf16", "entry", "portable"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 has several instruction sets")
def test_a_set_that_the_compiler_does_not_know_is_left_out(tree: Path) -> None:
    done = run(tree, compiler(tree, refused="-mavx512bf16"), "backend/inflight/attention/build.py")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_text().split() == ["avx2", "avx512", "entry", "portable"]


def test_a_failing_compiler_is_quoted(tree: Path) -> None:
    done = run(tree, compiler(tree, refused="-O3"), "backend/inflight/attention/build.py")
    assert done.returncode != 0
    assert "unrecognized command-line option -O3" in done.stderr
    assert not list(tree.glob("backend/inflight/attention/*.so*"))
