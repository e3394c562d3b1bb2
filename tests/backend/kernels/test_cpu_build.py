"""Building the CPU kernels: with a compiler, with an old one, and without any.

The compiler here is a fake that records its arguments; the real one has built the library that the
other tests use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from inflight.kernels.cpu import build

ROOT = Path(__file__).parents[3]
COMPILER = """#!/bin/sh
out= last= defined= linked=
for word; do
    if [ "$word" = "{refused}" ]; then
        echo "error: unrecognized command-line option {refused}" >&2
        exit 1
    fi
    [ "$last" = -o ] && out=$word
    case $word in
        -DINFLIGHT_SOURCES*) defined=$word ;;
        -shared) linked=yes ;;
    esac
    last=$word
done
if [ -z "$linked" ]; then
    echo "$defined" >"$out"
    exit
fi
for word; do
    case $word in
        "$out") ;;
        *.o)
            read -r text <"$word"
            name=${{word##*/}}
            echo "${{name%.o}} $text"
            ;;
    esac
done >"$out"
echo linked >>"{log}"
"""
SCRIPT = "backend/inflight/kernels/cpu/build.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree without the compiled library."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("backend", "client", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    demo = "model_repository/demo"  # in wheels, too; its weights are left out, as they take time to compress
    shutil.copytree(ROOT / demo, tmp_path / demo, ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path


def environment_of(tree: Path, compiler: str | None) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    environment["PATH"] = str(tree / "empty")
    if compiler is not None:
        environment["CXX"] = compiler
    return environment


def run(tree: Path, compiler: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment_of(tree, compiler), capture_output=True, text=True)


def compiler(tree: Path, refused: str = "nothing") -> str:
    path = tree / "compiler"
    path.write_text(COMPILER.format(refused=refused, log=tree / "log"))
    path.chmod(0o755)
    return str(path)


def make_wheel(tree: Path, compiler: str | None) -> tuple[Path, str]:
    pytest.importorskip("hatchling")
    done = run(tree, compiler, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").iterdir()
    return wheel, done.stdout + done.stderr


def test_a_wheel_contains_the_library_and_names_its_platform(tree: Path) -> None:
    wheel, _ = make_wheel(tree, compiler(tree))
    assert "py3-none-linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "inflight/kernels/cpu/_cpu_kernels.so" in names
    assert "inflight/kernels/cpu/cpu_attention_kernels.cpp" in names, "for another build where the wheel is installed"


@pytest.mark.parametrize("missing", [None, "/nowhere/g++"])
def test_without_a_compiler_the_install_succeeds(tree: Path, missing: str | None) -> None:
    wheel, output = make_wheel(tree, missing)
    assert wheel.name.endswith("py3-none-any.whl")
    assert "inflight/kernels/cpu/_cpu_kernels.so" not in zipfile.ZipFile(wheel).namelist()
    assert "installing without the CPU kernels" in output


def linked_units(library: Path) -> dict[str, set[str]]:
    """Instruction sets of each source in the fake's library; none for sources compiled once."""
    units: dict[str, set[str]] = {}
    for line in library.read_text().splitlines():
        source, _, isa = line.split()[0].partition(".")
        units.setdefault(source, set()).update({isa} - {""})
    return units


def test_every_instruction_set_is_linked(tree: Path) -> None:
    done = run(tree, compiler(tree), SCRIPT)
    assert done.returncode == 0, done.stderr
    units = linked_units(Path(done.stdout.strip()))
    vector = {"avx2", "avx512", "avx512vnni", "avx512bf16"} if os.uname().machine == "x86_64" else set()
    everything = {"portable"} | vector
    assert units["cpu_attention"] == set() and units["cpu_attention_kernels"] == everything
    assert set(units) == {path.stem for path in (ROOT / "backend/inflight/kernels/cpu").glob("*.cpp")}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 has several instruction sets")
def test_a_set_that_the_compiler_lacks_is_left_out(tree: Path) -> None:
    done = run(tree, compiler(tree, refused="-mavx512bf16"), SCRIPT)
    assert done.returncode == 0, done.stderr
    units = linked_units(Path(done.stdout.strip()))["cpu_attention_kernels"]
    assert units == {"portable", "avx2", "avx512", "avx512vnni"}


class TestCurrent:
    """A current library is not compiled again, regardless of file times."""

    BUILD = "import runpy; runpy.run_path('backend/inflight/kernels/cpu/build.py')['build']()"

    def links(self, tree: Path) -> int:
        log = tree / "log"
        return log.read_text().count("linked") if log.exists() else 0

    def test_only_changed_sources_are_compiled_again(self, tree: Path) -> None:
        stand_in = compiler(tree)
        source = tree / "backend/inflight/kernels/cpu/cpu_tiles.h"
        for _ in range(2):
            assert run(tree, stand_in, "-c", self.BUILD).returncode == 0
        os.utime(source)
        assert run(tree, stand_in, "-c", self.BUILD).returncode == 0
        assert self.links(tree) == 1
        source.write_text(source.read_text() + "// changed\n")
        assert run(tree, stand_in, "-c", self.BUILD).returncode == 0
        assert self.links(tree) == 2

    def test_a_current_library_needs_no_compiler(self, tree: Path) -> None:
        assert run(tree, compiler(tree), SCRIPT).returncode == 0
        assert run(tree, None, "-c", self.BUILD).returncode == 0

    def test_one_of_several_processes_compiles(self, tree: Path) -> None:
        environment = environment_of(tree, compiler(tree))
        command = [sys.executable, "-c", self.BUILD]
        running = [subprocess.Popen(command, cwd=tree, env=environment) for _ in range(4)]
        assert [process.wait() for process in running] == [0] * 4
        assert self.links(tree) == 1

    def test_a_failed_build_keeps_the_old_library(self, tree: Path) -> None:
        assert run(tree, compiler(tree), SCRIPT).returncode == 0
        (library,) = tree.glob("backend/inflight/kernels/cpu/*.so")
        before = library.read_text()
        assert run(tree, compiler(tree, refused="-shared"), SCRIPT).returncode != 0
        assert [path.read_text() for path in tree.glob("backend/inflight/kernels/cpu/*.so*")] == [before]


def test_a_folder_that_is_not_writable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(build.BuildError, match=r"kernels/cpu is not writable"):
        build.build()


def test_the_compilers_error_is_quoted(tree: Path) -> None:
    done = run(tree, compiler(tree, refused="-O3"), SCRIPT)
    assert done.returncode != 0
    assert "unrecognized command-line option -O3" in done.stderr
    assert not list(tree.glob("backend/inflight/kernels/cpu/*.so*"))
