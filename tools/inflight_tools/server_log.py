"""What a tritonserver's log says about why it failed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LoadingModels", "end_reason", "last_line", "load_failure"]

# How tritonserver, or the C++ and C libraries below it, word a fatal error. Every machine without a GPU logs the two
# lines that are left out, about NVML and the driver.
_FATAL = re.compile(
    r"(?m)^(?:E\d{4} [^\]]*\] (?!\"CudaDriverHelper has not been initialized)"
    r"|error: |Error: (?!Failed to initialize NVML)|\S*tritonserver: (?=\S+ option)"
    r"|(?=terminate called |double free |corrupted |\w+\(\): ))(.+(?:\n  what\(\): .*)?)$"
)
_EVENTS = re.compile(
    rb"\"loading: (?P<begun>[^\"]+):\d+\""
    rb"|\"TRITONBACKEND_ModelInstanceInitialize: (?P<instance>[^ \"]+) \("
    rb"|\"\[inflight\] (?P<loaded>[^ ]+): [^\"]*, loaded in [\d.]+ s\""
    rb"|(?:successfully loaded|failed to load) '(?P<ended>[^']+)'"
)
_SETTLE_SECONDS = 20.0  # between the last instance's last word and Triton's, which takes milliseconds


@dataclass(slots=True)
class _Load:
    since: float
    instances: int = 0
    loaded: int = 0
    loaded_since: float = 0.0


class LoadingModels:
    """Follows which models are being loaded, by what the server's log says.

    A launch of a stub can fail in a way that makes the server wait for that stub for ever: the model is
    neither loaded nor refused, and nothing else in the server shows it.  Triton does so when a stub that still
    initializes has shown no sign of life for 5 seconds of the wall clock: a machine that was suspended is enough.
    The stub itself goes on, and says that it has loaded the model.

    Args:
        log_file: the server's log, which grows.
        start: where this server's part of it begins, in bytes.
        timeout: seconds that a model may take to load.
    """

    def __init__(self, log_file: Path, start: int, timeout: float) -> None:
        self._log_file = log_file
        self._read = start
        self._timeout = timeout
        self._loads: dict[str, _Load] = {}

    def failure(self, now: float) -> str | None:
        """What is wrong if a model takes too long to load; `now` in seconds."""
        self._read_on(now)
        for name, load in self._loads.items():
            if now - load.since > self._timeout:
                return f"model '{name}' was neither loaded nor refused within {self._timeout:g} s"
            if 0 < load.instances <= load.loaded and now - load.loaded_since > _SETTLE_SECONDS:
                return f"model '{name}' was neither loaded nor refused, {_SETTLE_SECONDS:g} s after its stub was ready"
        return None

    def _read_on(self, now: float) -> None:
        """Up to the last whole line."""
        try:
            with open(self._log_file, "rb") as log:
                log.seek(self._read)
                text, newline, _ = log.read().rpartition(b"\n")
        except FileNotFoundError:  # somebody tidied up: the server is well
            return
        self._read += len(text) + len(newline)
        for event in _EVENTS.finditer(text):
            kind = event.lastgroup
            assert kind is not None
            name = event[kind].decode(errors="replace")
            if kind == "begun":
                self._loads[name] = _Load(now)
            elif kind == "ended":
                self._loads.pop(name, None)
            elif kind == "instance":
                for model, load in self._loads.items():
                    load.instances += re.fullmatch(re.escape(model) + r"(_\d+){1,2}", name) is not None
            elif name in self._loads:
                self._loads[name].loaded += 1
                self._loads[name].loaded_since = now


def load_failure(log: str) -> str | None:
    """Why a model failed to load; None if none has failed so far."""
    match = re.search(r"failed to load '([^']*)' version \d+: [A-Za-z ]+: (.*)", log)
    if match is None:
        return None
    # Triton quotes and escapes its messages; the Python traceback follows the first line.
    reason = match[2].split(r"\n")[0].rstrip('"').replace(r"\"", '"')
    return f"model '{match[1]}' failed to load: {reason}"


def end_reason(log: str) -> str:
    """Why the server ended: its last error, else its last line."""
    errors: list[str] = _FATAL.findall(log)
    return " ".join(errors[-1].split()).strip('"') if errors else last_line(log)


def last_line(log: str) -> str:
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "(the log is empty)")
