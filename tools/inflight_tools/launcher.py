"""Start and stop a `tritonserver` whose backends are Triton's Python backend and this package.

Where the server comes from, first match wins: `$TRITONSERVER`, the `nvidia-pytriton` wheel
(its files only; the package is never imported), `/opt/tritonserver`, `PATH`.  The launcher
lays out a backends folder in a temporary directory:

    backends/python/    libtriton_python.so, its utilities, the stub of this Python version
    backends/inflight   -> this package
    python/             a virtual environment for the stub that imports what this process imports

Every process of a server lives in a session of its own, so that Ctrl-C in a terminal reaches
only the launcher, which then decides the order.  Linux only, as Triton is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import inflight
from inflight_tools.installation import LauncherError, TritonInstallation, find_libpython, lay_out_interpreter

__all__ = ["LauncherError", "TritonServer", "pick_ports"]

_BACKEND = Path(inflight.__file__).resolve().parent
_SHM = Path("/dev/shm")
_POLL_SECONDS = 0.1
_GROUP_GRACE_SECONDS = 5.0  # for processes of the session that outlive the server itself

# Runs in the forked child, then becomes tritonserver: prctl(PR_SET_PDEATHSIG, SIGTERM) survives
# execve.  A preexec_fn would run Python between fork and exec of a threaded parent instead.
_EXEC_TIED_TO_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,15,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2],sys.argv[2:])"
)

# How tritonserver words what ends it; the NVML line is what every machine without a GPU shows.
_SERVER_ERROR = re.compile(
    r"(?m)^(?:E\d{4} [^\]]*\] |error: |Error: (?!Failed to initialize NVML)|\S*tritonserver: (?=\S+ option))(.+)$"
)


def pick_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports of `host` that are free now.

    Raises:
        LauncherError: `host` is no address of this machine.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(_family(host))) for _ in range(count)]
        try:
            for sock in sockets:
                sock.bind((host, 0))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LauncherError(f"cannot listen on host {host!r}: {reason}; change --host") from None
        return [sock.getsockname()[1] for sock in sockets]


class TritonServer:
    """A `tritonserver` process; a context manager that is ready inside and gone outside.

    Args:
        model_repository: one repository folder or several.
        host: address the three services listen on.
        http_port, grpc_port, metrics_port: 0 picks a free one; a `metrics_port` of None
            turns Triton's metrics off.
        model_control_mode: "none" loads every model at start, "explicit" only `load_models`.
        load_models: models loaded at start in explicit mode.
        extra_args: further `tritonserver` arguments.
        env: environment variables on top of this process's.
        log_file: where the server's output goes; None keeps it in the temporary directory.
        exit_timeout: seconds the server lets open requests finish when stopped.
        backend_dir: folder used as the `inflight` backend; None takes this package.
        backend_name: name of that backend in `config.pbtxt`.

    `start()` must be called in a thread that lives as long as the server should: the kernel
    ends the server with the thread that made it (PR_SET_PDEATHSIG).
    """

    def __init__(
        self,
        model_repository: str | Path | Sequence[str | Path],
        *,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int | None = 0,
        model_control_mode: str = "none",
        load_models: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_file: str | Path | None = None,
        exit_timeout: int = 30,
        backend_dir: str | Path | None = None,
        backend_name: str = "inflight",
    ) -> None:
        repositories = [model_repository] if isinstance(model_repository, (str, Path)) else model_repository
        self.repositories = [Path(repository).resolve() for repository in repositories]
        self.host = host
        self._asked_ports = {"HTTP": http_port, "GRPC": grpc_port, "metrics": metrics_port}
        self.ports: dict[str, int] = {}
        self._control_mode = model_control_mode
        self._load_models = list(load_models)
        self._extra_args = list(extra_args)
        self._env = dict(env or {})
        self._asked_log_file = Path(log_file) if log_file else None
        self._exit_timeout = exit_timeout
        self._backend_dir = Path(backend_dir or _BACKEND).resolve()
        self._backend_name = backend_name
        self._runtime_dir: Path | None = None
        self._last_log = ""
        self.log_file: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.shm_prefix = ""

    # -- addresses ------------------------------------------------------------------------

    @property
    def http_address(self) -> str:
        """`host:port` of the HTTP service."""
        return self._address("HTTP")

    @property
    def grpc_address(self) -> str:
        """`host:port` of the gRPC service."""
        return self._address("GRPC")

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus text at `/metrics`."""
        return self._address("metrics")

    def _address(self, service: str) -> str:
        if service not in self.ports:
            raise LauncherError(f"the {service} service has no address: the server is not started or has it turned off")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.ports[service]}"

    # -- life -----------------------------------------------------------------------------

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process without waiting for the models.

        Raises:
            LauncherError: no server, no stub or libpython for this Python, no such
                repository, a port in use, or a log file that cannot be read back.
        """
        if self.process is not None:
            raise LauncherError("the server was already started; make a new TritonServer for another one")
        for repository in self.repositories:
            if not repository.is_dir():
                raise LauncherError(f"{repository}: no such model repository folder")
        if self._asked_log_file and self._asked_log_file.exists() and not self._asked_log_file.is_file():
            raise LauncherError(f"{self._asked_log_file}: not a regular file; the server's log is read back from it")
        installation = TritonInstallation.find()
        libpython = find_libpython()
        self.ports = self._resolve_ports()
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="inflight-server-"))
        self.shm_prefix = self._runtime_dir.name.replace("-", "_") + "_"
        self.log_file = self._asked_log_file or self._runtime_dir / "tritonserver.log"
        try:
            installation.lay_out(self._runtime_dir / "backends", {self._backend_name: self._backend_dir})
            command = [str(installation.binary), *self._arguments()]
            wrapper = [sys.executable, "-I", "-S", "-c", _EXEC_TIED_TO_PARENT, str(os.getpid())]
            with open(self.log_file, "wb") as log:
                self.process = subprocess.Popen(
                    wrapper + command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(installation, libpython),
                    start_new_session=True,
                )
        except OSError as error:
            self._remove_runtime_dir()
            raise LauncherError(f"cannot start tritonserver: {error}") from None
        except BaseException:
            self._remove_runtime_dir()
            raise

    def wait_ready(self, timeout: float = 600.0) -> None:
        """Block until every model is ready.

        Raises:
            LauncherError: the server ended, a model failed to load (with its reason), or
                `timeout` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            reason = load_failure(self.log_text())
            if reason is not None:
                raise LauncherError(reason)
            if not self.is_running():
                raise LauncherError(self.exit_reason())
            if time.monotonic() > deadline:
                raise LauncherError(
                    f"tritonserver was not ready after {timeout:.0f} s; last log line: {_last_line(self.log_text())}"
                )
            time.sleep(_POLL_SECONDS)

    def is_running(self) -> bool:
        """Whether the server process lives."""
        return self.process is not None and self.process.poll() is None

    def lost_stubs(self) -> list[int]:
        """Stub processes that died under the server, which takes note of it only when it unloads their models."""
        return [] if self.process is None else dead_children(self.process.pid, "triton_python")

    def log_text(self) -> str:
        """All the server has written so far; after `stop()` what it had written."""
        if self.log_file is not None and self.log_file.exists():
            return self.log_file.read_text(encoding="utf-8", errors="replace")
        return self._last_log

    def stop(self) -> None:
        """End the server and everything it started: SIGTERM, wait, SIGKILL.  Safe to repeat."""
        process = self.process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self._exit_timeout + _GROUP_GRACE_SECONDS)
            deadline = time.monotonic() + _GROUP_GRACE_SECONDS
            while process.poll() is not None and session_members(process.pid) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything at once with SIGKILL and remove what the server leaves behind."""
        if self.process is not None:
            for pid in session_members(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        if self.shm_prefix:
            for left in _SHM.glob(self.shm_prefix + "*"):
                left.unlink(missing_ok=True)
        self._last_log = self.log_text()
        self._remove_runtime_dir()

    # -- parts ----------------------------------------------------------------------------

    def _resolve_ports(self) -> dict[str, int]:
        asked = {service: port for service, port in self._asked_ports.items() if port is not None}
        pick_ports(1, self.host)  # a wrong host is not the ports' fault
        fixed = [port for port in asked.values() if port]
        for service, port in asked.items():
            option = f"--{service.lower()}-port"
            if port and fixed.count(port) > 1:
                raise LauncherError(f"port {port} is given to more than one service; change {option}")
            if port:
                _check_port_free(self.host, port, service, option)
        free = iter(pick_ports(len(asked) - len(fixed), self.host))
        return {service: port or next(free) for service, port in asked.items()}

    def _arguments(self) -> list[str]:
        assert self._runtime_dir is not None
        arguments = [f"--model-repository={repository}" for repository in self.repositories]
        arguments += [
            f"--backend-directory={self._runtime_dir / 'backends'}",
            f"--model-control-mode={self._control_mode}",
            f"--http-address={self.host}",
            f"--http-port={self.ports['HTTP']}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports['GRPC']}",
            f"--exit-timeout-secs={self._exit_timeout}",
        ]
        if "metrics" in self.ports:
            arguments += [f"--metrics-address={self.host}", f"--metrics-port={self.ports['metrics']}"]
        else:
            arguments.append("--allow-metrics=false")
        # Triton 24.10 reads the prefix of a Python-based backend from the "python" entry (seen); the
        # backend's own entry is for releases that read that one.
        for backend in ("python", self._backend_name):
            arguments.append(f"--backend-config={backend},shm-region-prefix-name={self.shm_prefix}")
        arguments += [f"--load-model={name}" for name in self._load_models]
        return arguments + self._extra_args

    def _environment(self, installation: TritonInstallation, libpython: Path) -> dict[str, str]:
        assert self._runtime_dir is not None
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}
        interpreter = lay_out_interpreter(self._runtime_dir / "python")
        env["PATH"] = os.pathsep.join([str(interpreter), env.get("PATH", os.defpath)])
        # A folder with libpython alone: what else lies beside it (conda's lib) must shadow nothing.
        alone = self._runtime_dir / "lib"
        alone.mkdir()
        (alone / libpython.name).symlink_to(libpython)
        libraries = [str(alone), *map(str, installation.library_dirs), env.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return env

    def _is_ready(self) -> bool:
        if not self.is_running():
            return False
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.http_address}/v2/health/ready", timeout=2.0) as response:
                return response.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def exit_reason(self) -> str:
        """One line on why the server ended: its last error, else its last words."""
        assert self.process is not None
        log = self.log_text()
        errors = _SERVER_ERROR.findall(log)
        detail = errors[-1].strip('" ') if errors else _last_line(log)
        return f"tritonserver ended with status {self.process.returncode}: {detail}"

    def _remove_runtime_dir(self) -> None:
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)


def load_failure(log: str) -> str | None:
    """Why a model did not load, from the server's log; None while nothing failed."""
    match = re.search(r"failed to load '([^']*)' version \d+: [A-Za-z ]+: (.*)", log)
    if match is None:
        return None
    # Triton quotes and escapes its messages; what follows the first line is the Python trace.
    reason = match[2].split(r"\n")[0].rstrip('"').replace(r"\"", '"')
    return f"model '{match[1]}' failed to load: {reason}"


def session_members(session: int) -> list[int]:
    """Living processes (zombies excluded) of the session `session`."""
    return [pid for pid, _, state, _, sid in _processes() if sid == session and state not in "ZX"]


def dead_children(parent: int, name: str) -> list[int]:
    """Zombies that `parent` has not waited for, of a command whose name starts with `name`."""
    return [
        pid for pid, comm, state, ppid, _ in _processes() if ppid == parent and state == "Z" and comm.startswith(name)
    ]


def _processes() -> Iterator[tuple[int, str, str, int, int]]:
    """(process id, command's name, state, parent, session) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command's name stands in parentheses and may hold spaces: split after it.
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                state, ppid, _pgrp, sid = rest.split()[:4]
                yield int(entry.name), name, state, int(ppid), int(sid)


def _check_port_free(host: str, port: int, service: str, option: str) -> None:
    if not 0 < port < 2**16:
        raise LauncherError(f"port {port} ({service}): allowed are 0 to 65535; change {option}")
    with socket.socket(_family(host)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except PermissionError:
            raise LauncherError(f"no permission to listen on port {port} ({service}); change {option}") from None
        except OSError as error:
            raise LauncherError(
                f"port {port} ({service}) on {host}: {error.strerror}; change {option} (0 picks a free port)"
            ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _last_line(log: str) -> str:
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "(the log is empty)")
