"""The process that renders chat templates: `render_client.py` starts it and sets its limits.

The kernel enforces the limits, so they apply inside C code, too: for Python, `{{ "a" * 10**10 }}` and
`{{ 9 ** 9 ** 9 }}` are one instruction each.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType

from inflight.frontend.chat.chat_messages import ChatTemplateError
from inflight.frontend.chat.renderer import TemplateRenderer

__all__ = ["ERROR", "MAX_TEXT_BYTES", "TEXT", "main"]

TEXT, ERROR = b"t", b"e"  # first byte of an answer
MAX_TEXT_BYTES = 64 * 2**20  # far more than any context


class _TooSlowError(BaseException):
    """Not an `Exception`: Jinja's generated code and filters catch these."""


def _too_slow(signum: int, frame: FrameType | None) -> None:
    raise _TooSlowError


def main() -> None:
    """Answer each frame with one; the first frame is the template.  Returns when the pipe closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_args().fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to the whole group
    signal.signal(signal.SIGPROF, _too_slow)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGVTALRM})  # the parent's thread may block them
    try:
        settings = json.loads(connection.recv_bytes())
        _limit_memory(settings["bytes"])
        limits = _Limits(settings["seconds"], settings["bytes"])
        made: list[TemplateRenderer] = []

        def make() -> bytes:
            made.append(TemplateRenderer(settings["text"], settings["special_tokens"], settings["text_with_tools"]))
            return b""

        answer = limits.run(make)
        connection.send_bytes(answer)
        while made:
            chat = connection.recv_bytes()
            connection.send_bytes(limits.run(lambda: made[0].render(chat)))  # noqa: B023 - it runs now
    except (EOFError, OSError):
        pass  # the stub is gone, or has closed the pipe


class _Limits:
    """The limits of one call: seconds of CPU time and bytes of memory."""

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds = seconds
        self._size = size

    def run(self, call: Callable[[], bytes]) -> bytes:
        """The answer: the result of `call`, or an error."""
        try:
            try:
                self._arm(self._seconds)
                text = call()
            finally:
                self._arm(0)
            if len(text) > MAX_TEXT_BYTES:
                return ERROR + f"the chat template made {len(text)} bytes of text".encode()
            return TEXT + text
        except ChatTemplateError as error:
            return ERROR + str(error)[:1000].encode(errors="replace")
        except _TooSlowError:
            return ERROR + f"the chat template took more than {self._seconds:g} s (chat_template_timeout)".encode()
        except MemoryError:
            return ERROR + f"the chat template needs more than {self._size // 2**20} MiB of memory".encode()

    @staticmethod
    def _arm(seconds: float) -> None:
        """After `seconds` of CPU time an exception is raised; after twice as many (in C code) the process ends."""
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(size: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
