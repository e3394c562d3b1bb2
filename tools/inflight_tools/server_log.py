"""What a tritonserver's log says about why it failed."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["LoadingModels", "end_reason", "last_line", "load_failure"]

# How tritonserver words a fatal error; the NVML line appears on every machine without a GPU.
_FATAL = re.compile(
    r"(?m)^(?:E\d{4} [^\]]*\] |error: |Error: (?!Failed to initialize NVML)|\S*tritonserver: (?=\S+ option))(.+)$"
)


_LOADING = re.compile(rb"\"(?:(loading): ([^\"]+):\d+\"|(?:successfully loaded|failed to load) '([^']+)')")


class LoadingModels:
    """Follows which models are being loaded, by what the server's log says.

    A launch of a stub can fail in a way that makes the server wait for that stub for ever: the model is
    neither loaded nor refused, and nothing else in the server shows it.

    Args:
        log_file: the server's log, which grows.
        start: where this server's part of it begins, in bytes.
        timeout: seconds that a model may take to load.
    """

    def __init__(self, log_file: Path, start: int, timeout: float) -> None:
        self._log_file = log_file
        self._read = start
        self._timeout = timeout
        self._since: dict[str, float] = {}

    def failure(self, now: float) -> str | None:
        """What is wrong if a model takes too long to load; `now` in seconds."""
        self._read_on(now)
        for name, since in self._since.items():
            if now - since > self._timeout:
                return f"model '{name}' was neither loaded nor refused within {self._timeout:g} s"
        return None

    def _read_on(self, now: float) -> None:
        """Up to the last whole line."""
        with open(self._log_file, "rb") as log:
            log.seek(self._read)
            text, newline, _ = log.read().rpartition(b"\n")
        self._read += len(text) + len(newline)
        for loading, name, ended in _LOADING.findall(text):
            if loading:
                self._since[name.decode(errors="replace")] = now
            else:
                self._since.pop(ended.decode(errors="replace"), None)


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
    return errors[-1].strip('" ') if errors else last_line(log)


def last_line(log: str) -> str:
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "(the log is empty)")
