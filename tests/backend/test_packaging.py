"""Facts that are written twice agree: the image's packages, the repository examples, the build files."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

from inflight.kernels.cpu import build, library
from inflight.model_json import read_model_json
from inflight_tools.repository import CONFIG_PBTXT
from inflight_tools.simulator.profile import shipped_profiles

ROOT = Path(__file__).parents[2]


def _statements(pbtxt: str) -> list[str]:
    return [line for line in pbtxt.splitlines() if line and not line.startswith("#")]


def test_the_image_installs_what_backend_and_gateway_need() -> None:
    text = (ROOT / "Dockerfile").read_text()
    asked = {Requirement(found) for found in re.findall(r'"([a-z0-9-]+(?:\[grpc\])?>=[^"]+)"', text)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["backend"], *extras["gateway"], *extras["otel"], *extras["kv"]]
    needed += extras["lmcache"]
    needed += [one for one in extras["server"] if one.startswith("psutil")]  # for `inflight-drain`
    grpc_only = [one.replace("tritonclient[all]", "tritonclient[grpc]") for one in needed]
    assert asked == {Requirement(one) for one in grpc_only if not one.startswith("numpy")}
    assert '"numpy<2"' in text


def test_the_image_for_cpus_has_what_every_option_needs() -> None:
    """Extras that are for users of the image; the others are for checkouts."""
    (named,) = re.findall(r"\.whl\)\[([^]]+)\]", (ROOT / "Dockerfile.cpu").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named.split(",")) == extras.keys() - {"loadtest", "bench", "browser", "test", "docs"}


def test_no_message_names_the_distribution_of_someone_else() -> None:
    """PyPI's `inflight` is another project; this one is `triton-inflight`, and its packages keep their names."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == "triton-inflight"
    named = re.compile(r"""pip install [^\n`]*?(?<![\w/.-])inflight(?:\[|['"\s]|$)""", re.MULTILINE)
    folders = [ROOT / name for name in ("backend", "client", "gateway", "tools", "docs", "deploy", "loadtest", "bench")]
    files = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "Makefile"]
    files += [file for folder in folders for file in folder.rglob("*") if file.suffix in {".py", ".md", ".sh", ".yaml"}]
    assert named.search("pip install 'inflight[server]'") and not named.search("pip install 'triton-inflight[server]'")
    assert [file.name for file in files if named.search(file.read_text(encoding="utf-8"))] == []


def test_the_image_compiles_the_kernels_and_takes_none_from_the_checkout() -> None:
    text = (ROOT / "Dockerfile").read_text()
    compile_stage, image = text.split("\nFROM nvcr.io")
    assert "RUN python3 /inflight/kernels/cpu/build.py" in compile_stage
    assert "COPY --from=kernels /inflight /opt/tritonserver/backends/inflight" in image and "g++" not in image
    assert "**/*.so" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.skipif(not build.is_current() or library.unavailable() is not None, reason="no library of these sources")
class TestWheel:
    @pytest.mark.nightly
    def test_installed_in_a_fresh_environment_the_kernel_loads(self, tmp_path: Path) -> None:
        """The wheel alone; torch and the others are found where this test finds them."""
        pytest.importorskip("hatchling")
        tree, fresh = tmp_path / "tree", tmp_path / "fresh"
        for name in ("backend", "client", "gateway", "tools"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "model_repository" / "demo", tree / "model_repository" / "demo")
        for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        self.run(tree, sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist")
        (wheel,) = (tree / "dist").iterdir()
        files = set(zipfile.ZipFile(wheel).namelist())
        assert {path.split("/")[0] for path in files if ".dist-info" not in path} == {
            "inflight", "inflight_client", "inflight_gateway", "inflight_tools"
        }  # fmt: skip
        profiles = {f"inflight_tools/simulator/profiles/{name}.json" for name in shipped_profiles()}
        page = {f"inflight_gateway/page/static/{name}" for name in ("index.html", "docs.html", "main.js", "page.css")}
        assert profiles | {"inflight_tools/trace/page.html", "inflight_client/endpoint.py"} | page <= files and profiles
        self.run(tree, sys.executable, "-m", "venv", "--without-pip", str(fresh))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(fresh)]
        self.run(tree, *pip, "install", "--no-deps", "--no-index", str(wheel))
        names = "library.__file__, library.unavailable(), build.is_current()"
        code = f"from inflight.kernels.cpu import build, library; print({names})"
        said = self.run(tmp_path, str(fresh / "bin" / "python"), "-c", code).split()
        assert Path(said[0]).is_relative_to(fresh) and said[1:] == ["None", "True"]
        assert "Serve the demo model" in self.run(tmp_path, str(fresh / "bin" / "inflight"), "demo", "--help")
        code = "from inflight_tools.cli import _demo_repository; print(_demo_repository())"
        demo = Path(self.run(tmp_path, str(fresh / "bin" / "python"), "-c", code).strip()) / "demo"
        config = read_model_json(demo / "1" / "model.json")
        assert demo.is_relative_to(fresh) and (Path(config.model) / "model.safetensors").is_file()

    @staticmethod
    def run(folder: Path, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(torch.__file__).parents[1]), "CXX": "/nowhere/g++"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_it_needs_no_newer_c_library_than_torch_and_no_openmp_of_its_own(self) -> None:
        """torch's wheels are manylinux_2_28; torch brings the OpenMP runtime."""
        compiled = build.LIBRARY.read_bytes()
        versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", compiled)
        assert max((int(major), int(minor)) for major, minor in versions) <= (2, 28)
        assert not re.search(rb"lib(gomp|omp|iomp5)\.so", compiled)


def test_a_wheel_names_the_repository_whose_workflow_built_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = runpy.run_path(str(ROOT / "hatch_build.py"))
    metadata = {"version": "1.2.0"}
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    hooks["RepositoryUrls"](str(ROOT), {}).update(metadata)
    assert metadata["urls"] == {}
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "a/b")
    hooks["RepositoryUrls"](str(ROOT), {}).update(metadata)
    assert metadata["urls"]["Changelog"] == "https://github.com/a/b/blob/v1.2.0/CHANGELOG.md"


@pytest.mark.parametrize("name", ["demo", "template"])
def test_example_entries_load_and_match_what_the_command_line_writes(name: str) -> None:
    entry = ROOT / "model_repository" / name
    read_model_json(entry / "1" / "model.json")
    assert _statements((entry / "config.pbtxt").read_text()) == _statements(CONFIG_PBTXT)


def test_make_finds_versions_in_pyproject() -> None:
    made = subprocess.run(["make", "-n", "run", "VENV=/nowhere/venv"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert re.search(r"whl/cpu 'torch>=[\d.]+,<[\d.]+'", made.stdout)
    assert ".[backend,server]" in made.stdout


def test_make_without_a_usable_python_says_what_to_install() -> None:
    made = subprocess.run(["make", "run", "VENV=/nowhere/venv", "PYTHON="], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode != 0
    assert "no Python 3.10 to 3.13" in made.stderr


def test_make_wheel_names_the_oldest_system_that_it_runs_on() -> None:
    made = subprocess.run(["make", "-n", "wheel", "VENV=/nowhere/venv"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    steps = [made.stdout.index(step) for step in ("kernels/cpu/build.py", "hatchling build", "auditwheel repair")]
    assert steps == sorted(steps)
