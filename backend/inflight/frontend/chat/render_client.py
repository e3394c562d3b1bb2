"""The parent's handle of the process that renders chat templates.  No torch, no Triton.

A template is a program, and clients choose its input: it must not block the stub's thread or fill its memory.  The
kernel limits the time and the memory of a separate process, and the stub's thread has less work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from inflight.frontend.chat.chat_messages import ChatTemplateError
from inflight.frontend.chat.render_worker import ERROR, MAX_TEXT_BYTES
from inflight.frontend.engine_client.engine_process import module_command

__all__ = ["RenderClient"]

_START_SECONDS = 60.0  # for Python to start, on a machine that has other things to do
_EXIT_SECONDS = 2.0
_SPARE_SECONDS = 20.0  # that a call can wait for a core, in addition to its CPU time
_ATTEMPTS = 2
_HIDDEN = "INFLIGHT_ADMIN_KEY"


class RenderClient:
    """Starts the process (at the first chat, unless `start` was called), sends it chats, and replaces one that is gone.
     Threads that share it take turns.

    Args:
        text: Jinja source; None: each chat brings a template of its own.
        special_tokens: names such as `bos_token` that the template can use.
        seconds: CPU time of a call.
        size: bytes of memory that it can use.
        text_with_tools: Jinja source for chats with tools; None: `text` renders them.
    """

    def __init__(
        self,
        text: str | None,
        special_tokens: Mapping[str, str],
        seconds: float,
        size: int = 2**30,
        text_with_tools: str | None = None,
    ) -> None:
        settings = {
            "text": text,
            "text_with_tools": text_with_tools,
            "special_tokens": special_tokens,
            "seconds": seconds,
            "bytes": size,
        }
        self._settings = json.dumps(settings).encode()
        self._seconds = seconds
        self._patience = 3 * seconds + _SPARE_SECONDS
        self._turn = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_compiled = self._closed = False

    def start(self) -> None:
        """Start the process, and do not wait for it."""
        with self._turn:
            self._start()

    def check(self) -> None:
        """Wait until the template is compiled.

        Raises:
            ChatTemplateError: it cannot be used.
        """
        with self._turn:
            self._compiled()

    def render(self, chat: str) -> str:
        """Prompt text for the JSON of a chat.

        Raises:
            ChatTemplateError: as `TemplateRenderer.render`, or the template takes too long or needs too much memory.
        """
        with self._turn:
            for _ in range(_ATTEMPTS):
                self._compiled()
                answer = self._ask(chat.encode(errors="replace"), self._patience)
                if answer is not None:
                    return self._text(answer).decode()
        raise ChatTemplateError("the processes that render the chat template were killed or stopped; try again")

    def close(self) -> None:
        """End the process at once, even while it renders."""
        self._closed = True
        popen = self._popen
        if popen is not None:
            popen.kill()
        with self._turn:
            self._end()

    # -- with the turn --------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise ChatTemplateError("the model is being unloaded")
        ours, theirs = socket.socketpair()
        # A send or receive must end even if the process is stopped in the middle of it.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(self._patience), 0))
        with theirs:
            self._popen = subprocess.Popen(
                [*module_command("inflight.frontend.chat.render_worker"), "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if key != _HIDDEN},
            )
        self._connection = Connection(ours.detach())
        self._is_compiled = False
        with contextlib.suppress(OSError):  # it died at once: the next call will notice
            self._connection.send_bytes(self._settings)

    def _compiled(self) -> None:
        """Wait until a process has compiled the template."""
        for _ in range(_ATTEMPTS):
            if self._popen is None:
                self._start()
            if self._is_compiled:
                return
            answer = self._ask(None, _START_SECONDS)
            if answer is not None:
                self._text(answer)
                self._is_compiled = True
                return
        raise ChatTemplateError("the process that renders the chat template cannot be started")

    def _ask(self, frame: bytes | None, patience: float) -> bytes | None:
        """Wait `patience` seconds for the answer; None if the process is gone or stopped, and a new one can be asked.

        Raises:
            ChatTemplateError: it took too long.
        """
        assert self._connection is not None
        asked = time.monotonic()
        try:
            if frame is not None:
                self._connection.send_bytes(frame)
            if self._connection.poll(patience):
                return self._connection.recv_bytes(MAX_TEXT_BYTES + 1)
        except (EOFError, OSError):
            pass
        is_late, is_stopped = time.monotonic() - asked >= patience, self._is_stopped()
        if self._end() == -signal.SIGVTALRM or (is_late and not is_stopped):
            raise ChatTemplateError(f"the chat template took more than {self._seconds:g} s (chat_template_timeout)")
        return None

    def _text(self, answer: bytes) -> bytes:
        if answer[:1] == ERROR:
            raise ChatTemplateError(answer[1:].decode())
        return answer[1:]

    def _is_stopped(self) -> bool:
        """By a signal or a debugger: the template is not to blame for the time."""
        try:
            with open(f"/proc/{self._popen.pid if self._popen else 0}/stat", encoding="ascii") as file:
                return file.read().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, ValueError):  # it is gone
            return False

    def _end(self) -> int | None:
        """End the process, if there is one; returns its exit status, or None."""
        popen, self._popen = self._popen, None
        if popen is None or self._connection is None:
            return None
        self._connection.close()
        try:
            return popen.wait(_EXIT_SECONDS)  # it ends when the pipe closes, unless it is busy
        except subprocess.TimeoutExpired:
            popen.kill()
            return popen.wait()
