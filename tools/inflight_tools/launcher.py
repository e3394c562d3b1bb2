"""Start and stop a `tritonserver` whose backends are Triton's Python backend and this package.

`installation` finds the server.  The launcher lays out a backends folder in a temporary directory:

    backends/python/    libtriton_python.so, its utilities, the stub for this Python version
    backends/inflight   -> this package
    python/             a virtual environment in which the stub imports what this process imports

All processes of a server share a session of their own, so Ctrl-C in a terminal reaches only the
launcher, which then stops them in order.  Linux only, like Triton.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import inflight
from inflight_tools import admin
from inflight_tools.draining import drain_models
from inflight_tools.installation import LauncherError, TritonInstallation, find_libpython, lay_out_interpreter
from inflight_tools.ports import resolve_ports
from inflight_tools.processes import STUB_NAME, children, end_of
from inflight_tools.repository import longest_drain
from inflight_tools.server_log import end_reason, last_line, load_failure
from inflight_tools.sweeper import Sweeper, kill_session, remove_shared_memory, session_members
from inflight_tools.tenant_headers import forward_arguments

__all__ = ["LauncherError", "TritonServer"]

_BACKEND = Path(inflight.__file__).resolve().parent
_POLL_SECONDS = 0.1
# A model that is loaded over HTTP occupies a thread of the service, and the streams of that thread can stall forever
# (docs/operations.md): more threads, fewer streams on each.
_HTTP_THREADS = 64
_GRACE_SECONDS = 5.0  # for a stub to notice that it is to drain, and for processes that outlive the server

# Runs in the child before it becomes tritonserver: prctl(PR_SET_PDEATHSIG, SIGTERM) survives execve.
# A preexec_fn would instead run Python between fork and exec of a multi-threaded parent.
_EXEC_TIED_TO_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,15,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2],sys.argv[2:])"
)

# tritonserver keeps what its largest responses took, in a heap for each of its hundred threads.  With two heaps, and
# large buffers outside of them, it returns most of it.  The stub takes this from the engine (`INFLIGHT_SERVER_MALLOC`):
# its large buffers come and go with each step.
_MALLOC = "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=1048576:glibc.malloc.trim_threshold=4194304"


class TritonServer:
    """A `tritonserver` process; as a context manager, ready on entry and gone on exit.

    Args:
        model_repository: one or more repository folders.
        host: address that the three services listen on.
        http_port, grpc_port, metrics_port: 0 picks a free port; `metrics_port=None` disables
            Triton's metrics.
        model_control_mode: "none" loads every model at start, "explicit" only `load_models`.
        load_models: models to load at start in explicit mode.
        extra_args: further arguments for `tritonserver`.
        env: environment variables to add to those of this process.
        log_file: receives the server's output; None keeps it in the temporary directory.
        exit_timeout: seconds that open requests have to finish when the server is stopped; None: the longest
            `drain_timeout` of the repository's models.
        backend_dir: folder of the `inflight` backend; None uses the installed package.
        backend_name: name of that backend in `config.pbtxt`.
        temporary: folders to remove if this process is killed; what else the server leaves is removed in any case.
        admin_key: what callers of the management endpoints and of `control` must send; None leaves both open to
            every client that reaches the ports.  Other users of this machine can read it in the list of processes.

    Call `start()` in a thread that lives as long as the server should: the kernel ends the server
    together with the thread that started it (PR_SET_PDEATHSIG).
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
        exit_timeout: float | None = None,
        backend_dir: str | Path | None = None,
        backend_name: str = "inflight",
        temporary: Sequence[str | Path] = (),
        admin_key: str | None = None,
    ) -> None:
        if admin_key is not None:
            try:
                admin.check_key(admin_key)
            except ValueError as error:
                raise LauncherError(str(error)) from None
        self.admin_key = admin_key
        repositories = [model_repository] if isinstance(model_repository, (str, Path)) else model_repository
        self.repositories = [Path(repository).resolve() for repository in repositories]
        self.host = host
        self._requested_ports = {"HTTP": http_port, "GRPC": grpc_port, "metrics": metrics_port}
        self.ports: dict[str, int] = {}
        self._control_mode = model_control_mode
        self._load_models = list(load_models)
        self._extra_args = list(extra_args)
        self._env = dict(env or {})
        self._log_path = Path(log_file) if log_file else None
        self._given_exit_timeout = exit_timeout
        self._exit_timeout = 0.0
        self._backend_dir = Path(backend_dir or _BACKEND).resolve()
        self._backend_name = backend_name
        self._temporary = list(temporary)
        self._sweeper: Sweeper | None = None
        self._runtime_dir: Path | None = None
        self._last_log = b""
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

    @property
    def addresses(self) -> list[str]:
        """Of the services that take requests."""
        return [self.http_address, self.grpc_address]

    @property
    def admin_headers(self) -> dict[str, str]:
        """HTTP headers that the management endpoints ask for."""
        return admin.http_headers(self.admin_key)

    @property
    def admin_metadata(self) -> dict[str, str]:
        """gRPC metadata that the management calls ask for."""
        return admin.grpc_metadata(self.admin_key)

    def _address(self, service: str) -> str:
        if service not in self.ports:
            raise LauncherError(
                f"the {service} service has no address: the server is not running, or the service is disabled"
            )
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.ports[service]}"

    # -- lifecycle ------------------------------------------------------------------------

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
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
                repository, an unusable port, or a log file that is not a regular file.
        """
        if self.process is not None:
            raise LauncherError("this server was already started; create another TritonServer")
        for repository in self.repositories:
            if not repository.is_dir():
                raise LauncherError(f"{repository}: no such model repository folder")
        if self._log_path and self._log_path.exists() and not self._log_path.is_file():
            raise LauncherError(f"{self._log_path}: not a regular file; the launcher reads the server's log back")
        installation = TritonInstallation.find()
        libpython = find_libpython()
        self.ports = resolve_ports(self._requested_ports, self.host)
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="inflight-server-"))
        self.shm_prefix = self._runtime_dir.name.replace("-", "_") + "_"
        self.log_file = self._log_path or self._runtime_dir / "tritonserver.log"
        given = self._given_exit_timeout
        self._exit_timeout = longest_drain(self.repositories) + _GRACE_SECONDS if given is None else given
        try:
            folders = [self._runtime_dir, *self._temporary]
            self._sweeper = Sweeper(folders, self.shm_prefix, self._exit_timeout + _GRACE_SECONDS)
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
            self._sweeper.watch(self.process.pid)
        except OSError as error:
            self._remove_runtime_dir()
            raise LauncherError(f"cannot start tritonserver: {error}") from None
        except BaseException:
            self._remove_runtime_dir()
            raise

    def wait_ready(self, timeout: float = 600.0, check: Callable[[], None] = lambda: None) -> None:
        """Block until every model is ready, or until `check`, called at each look, raises.

        Raises:
            LauncherError: the server ended, a model failed to load (the message says why), or
                it was not ready after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            check()
            reason = load_failure(self.log_text())
            if reason is not None:
                raise LauncherError(reason)
            if not self.is_running():
                raise LauncherError(self.exit_reason())
            if time.monotonic() > deadline:
                raise LauncherError(
                    f"tritonserver was not ready after {timeout:.0f} s; last log line: {last_line(self.log_text())}"
                )
            time.sleep(_POLL_SECONDS)

    def is_running(self) -> bool:
        """Whether the server process is alive."""
        return self.process is not None and self.process.poll() is None

    def log_text(self) -> str:
        """The server's output so far; still available after `stop()`."""
        return self.log_bytes().decode(errors="replace")

    def log_bytes(self) -> bytes:
        """As `log_text`, not decoded."""
        if self.log_file is not None and self.log_file.exists():
            return self.log_file.read_bytes()
        return self._last_log

    def stop(self, check: Callable[[], None] = lambda: None) -> None:
        """Stop the server and everything it started: drain, SIGTERM, wait, SIGKILL.  Safe to repeat.

        Args:
            check: called at each look; if it raises, what is left is killed at once.
        """
        process = self.process
        if process is None:
            return
        try:
            if process.poll() is None:
                drained = drain_models(process.pid, self._exit_timeout, check)
                process.send_signal(signal.SIGTERM)
                # Triton waits for gRPC streams that clients keep open, though nothing runs in them.
                self._wait_for_end(process, 0.0 if drained else self._exit_timeout, check)
            deadline = time.monotonic() + _GRACE_SECONDS
            while process.poll() is not None and session_members(process.pid) and time.monotonic() < deadline:
                check()
                time.sleep(_POLL_SECONDS)
        finally:
            self.kill()

    def _wait_for_end(self, process: subprocess.Popen[bytes], seconds: float, check: Callable[[], None]) -> None:
        """Wait until the server has ended, but not for one that waits for a dead stub until its exit timeout."""
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        lost: set[int] = set()
        while process.poll() is None and time.monotonic() < deadline:
            check()
            before, lost = lost, {pid for pid in children(process.pid, STUB_NAME) if end_of(pid)}
            if before & lost:  # seen twice: what the server itself has ended is reaped by then
                return
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """Kill everything at once and remove what the server leaves behind."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()  # first: its clients' connections end with it
            kill_session(self.process.pid)
            self.process.wait()
        if self.shm_prefix:
            remove_shared_memory(self.shm_prefix)
        self._last_log = self.log_bytes()
        self._remove_runtime_dir()

    # -- internals ------------------------------------------------------------------------

    def _arguments(self) -> list[str]:
        assert self._runtime_dir is not None
        arguments = [f"--model-repository={repository}" for repository in self.repositories]
        arguments += [
            f"--backend-directory={self._runtime_dir / 'backends'}",
            f"--model-control-mode={self._control_mode}",
            f"--http-address={self.host}",
            f"--http-port={self.ports['HTTP']}",
            f"--http-thread-count={_HTTP_THREADS}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports['GRPC']}",
            f"--exit-timeout-secs={math.ceil(self._exit_timeout)}",
        ]
        if "metrics" in self.ports:
            arguments += [f"--metrics-address={self.host}", f"--metrics-port={self.ports['metrics']}"]
        else:
            arguments.append("--allow-metrics=false")
        # Triton 24.10 reads the prefix of a Python-based backend from the "python" entry; other
        # releases read the entry of the backend itself.
        for backend in ("python", self._backend_name):
            arguments.append(f"--backend-config={backend},shm-region-prefix-name={self.shm_prefix}")
        arguments += [f"--load-model={name}" for name in self._load_models]
        if self.admin_key is not None:
            arguments += admin.restrictions(self.admin_key)
        if not any("header-forward-pattern" in argument for argument in self._extra_args):
            arguments += forward_arguments(self.repositories)
        return arguments + self._extra_args

    def _environment(self, installation: TritonInstallation, libpython: Path) -> dict[str, str]:
        assert self._runtime_dir is not None
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}
        env.setdefault("TQDM_POSITION", "-1")  # the hub's library then shows downloads, though stderr is a file
        env.setdefault("TQDM_MININTERVAL", "1")
        if "GLIBC_TUNABLES" not in env:
            env |= {"GLIBC_TUNABLES": _MALLOC, "INFLIGHT_SERVER_MALLOC": "1"}
        env.pop(admin.ENVIRONMENT, None)
        if self.admin_key is not None:
            env[admin.ENVIRONMENT] = self.admin_key
        interpreter = lay_out_interpreter(self._runtime_dir / "python")
        env["PATH"] = os.pathsep.join([str(interpreter), env.get("PATH", os.defpath)])
        # A folder with nothing but libpython: its neighbours (such as conda's lib) must not shadow anything.
        lib = self._runtime_dir / "lib"
        lib.mkdir()
        (lib / libpython.name).symlink_to(libpython)
        libraries = [str(lib), *map(str, installation.library_dirs), env.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return env

    def _is_ready(self) -> bool:
        if not self.is_running():
            return False
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.http_address}/v2/health/ready", timeout=2.0) as response:
                return response.status == 200 and self._serves_metrics()
        except (OSError, urllib.error.URLError):
            return False

    def _serves_metrics(self) -> bool:
        """Whether the metrics take connections, if they are on; Triton opens their port last, after it is ready."""
        if "metrics" in self.ports:
            host, _, port = self.metrics_address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        return True

    def exit_reason(self) -> str:
        """One line on why the server ended."""
        assert self.process is not None
        return f"tritonserver ended with status {self.process.returncode}: {end_reason(self.log_text())}"

    def _remove_runtime_dir(self) -> None:
        """The last thing: until then the sweeper would do it."""
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
        if self._sweeper is not None:
            self._sweeper.dismiss()
