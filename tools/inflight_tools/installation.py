"""Finds a `tritonserver` and lays out the Python parts it needs: stub, libpython, backends folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import site
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LauncherError", "ServerDied", "TritonInstallation", "find_libpython", "find_wheel", "lay_out_interpreter"]

_OPT = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"
_INSTALL = "pip install 'triton-inflight[server]'"


class LauncherError(RuntimeError):
    """The server cannot start or has ended; the message is one line with the fix.

    Attributes:
        status: exit status of a command that ends with it.
    """

    status = 1


class ServerDied(LauncherError):
    """A server that was ready has died; the message says which process and how."""

    status = 3


@dataclass(frozen=True)
class TritonInstallation:
    """The files of one `tritonserver`.

    Attributes:
        binary: the executable.
        python_backend: folder with `libtriton_python.so` and `triton_python_backend_utils.py`.
        stubs: stub executable by Python version ("3.11").
        library_dirs: folders that the dynamic loader must search.
    """

    binary: Path
    python_backend: Path
    stubs: Mapping[str, Path]
    library_dirs: tuple[Path, ...] = ()

    @classmethod
    def find(cls) -> TritonInstallation:
        """The first of `$TRITONSERVER`, the nvidia-pytriton wheel, `/opt/tritonserver` and `PATH`.

        Only files of the wheel are used; the package is never imported.

        Raises:
            LauncherError: there is none, or `$TRITONSERVER` is not an executable file.
        """
        named = os.environ.get("TRITONSERVER")
        if named:
            if not os.access(named, os.X_OK) or Path(named).is_dir():
                raise LauncherError(f"TRITONSERVER={named} is not an executable file; unset it or correct it")
            return cls._installed(Path(named))
        wheel = find_wheel()
        if wheel is not None:
            return cls._from_wheel(wheel)
        on_path = shutil.which("tritonserver", path=f"{_OPT / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
        if on_path is None:
            raise LauncherError(f"tritonserver not found; run `{_INSTALL}`, or set TRITONSERVER to an installed one")
        return cls._installed(Path(on_path))

    @classmethod
    def _from_wheel(cls, root: Path) -> TritonInstallation:
        return cls(
            binary=root / "bin" / "tritonserver",
            python_backend=root / "backends" / "python",
            stubs={stub.parent.name: stub for stub in (root / "python_backend_stubs").glob(f"*/{_STUB}")},
            library_dirs=(root.parents[1] / "nvidia_pytriton.libs",),
        )

    @classmethod
    def _installed(cls, binary: Path) -> TritonInstallation:
        """NVIDIA's layout: `bin/tritonserver` beside `backends/python` with one stub."""
        root = binary.resolve().parents[1]
        python_backend = next(
            (path for path in (root / "backends" / "python", _OPT / "backends" / "python") if path.is_dir()), None
        )
        if python_backend is None:
            raise LauncherError(f"{root / 'backends' / 'python'} not found; install Triton with its Python backend")
        stub = python_backend / _STUB
        if not stub.is_file():
            raise LauncherError(f"{stub} not found; this tritonserver's Python backend is incomplete")
        linked = re.search(rb"libpython(3\.\d+)", stub.read_bytes())
        version = linked[1].decode() if linked else _python_version()
        return cls(binary, python_backend, {version: stub}, (root / "lib",))

    def lay_out(self, folder: Path, backends: Mapping[str, Path]) -> None:
        """Turn `folder` into a backends directory: `python/` plus a link for each of `backends`.

        Raises:
            LauncherError: no stub for the running Python.
        """
        version = _python_version()
        stub = self.stubs.get(version)
        if stub is None:
            known = ", ".join(sorted(self.stubs, key=lambda v: tuple(map(int, v.split("."))))) or "none"
            raise LauncherError(
                f"{self.binary} has no stub for Python {version} (available: {known}); use one of these Pythons"
            )
        python = folder / "python"
        python.mkdir(parents=True)
        # Copies rather than links: Triton rejects a backend library that resolves outside its folder, and
        # if a wheel lost the stub's executable bit, Triton's own chmod would remove its read bits.
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            shutil.copyfile(self.python_backend / name, python / name)
        shutil.copyfile(stub, python / _STUB)
        (python / _STUB).chmod(0o755)
        for name, target in backends.items():
            (folder / name).symlink_to(target, target_is_directory=True)


def find_wheel() -> Path | None:
    """`pytriton/tritonserver` of the nvidia-pytriton wheel, found without importing it."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("pytriton")
        for place in (spec.submodule_search_locations or []) if spec else []:
            root = Path(place) / "tritonserver"
            if (root / "bin" / "tritonserver").is_file():
                return root
    return None


def find_libpython() -> Path:
    """The shared libpython of the running interpreter, which the stub is linked against.

    Raises:
        LauncherError: this Python was built without one, and none is installed.
    """
    version = _python_version()
    name = f"libpython{version}.so.1.0"
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        os.path.join(sys.base_prefix, "lib"),
        os.path.join(sys.base_prefix, "lib64"),
        sysconfig.get_config_var("LIBPL"),
        f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
        "/usr/lib64",
        "/usr/local/lib",
    ]
    for folder in filter(None, folders):
        path = Path(folder) / name
        if path.is_file():
            return path
    raise LauncherError(
        f"{name} not found; Triton's Python stub needs it: install it "
        f"(Debian and Ubuntu: apt install libpython{version}; Fedora: dnf install python3-libs; "
        f"pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared; the Pythons of uv and conda include it)"
    )


def lay_out_interpreter(folder: Path) -> Path:
    """Turn `folder` into a virtual environment that imports what this interpreter imports.

    The stub finds its prefix through the `python3` on PATH and, from Python 3.11 on, runs isolated:
    it sees neither PYTHONPATH nor the user's site-packages (Triton 24.10).  What it starts with
    `sys.executable` runs in the same environment.

    Returns:
        The folder to put first on PATH.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    site_folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    library = next((folder / "lib").glob("python3.*/site-packages"))
    (library / "inflight.pth").write_text(
        f"import site, sys; sys.path.extend({paths!r}); list(map(site.addsitedir, {site_folders!r}))\n"
    )
    return folder / "bin"


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
