"""Finds the reason of a failure in a tritonserver's log."""

from __future__ import annotations

import re

__all__ = ["end_reason", "last_line", "load_failure"]

# How tritonserver, or the C++ and C libraries below it, word a fatal error. Every machine without a GPU logs the two
# lines that are left out, about NVML and the driver.
_FATAL = re.compile(
    r"(?m)^(?:E\d{4} [^\]]*\] (?!\"CudaDriverHelper has not been initialized)"
    r"|error: |Error: (?!Failed to initialize NVML)|\S*tritonserver: (?=\S+ option)"
    r"|(?=terminate called |double free |corrupted |\w+\(\): ))(.+(?:\n  what\(\): .*)?)$"
)


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
