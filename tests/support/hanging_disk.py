"""A file system that hangs when it is told to, as a disk without its server does: FUSE, in a process of its own.

A call that the server has taken and does not answer cannot be interrupted: not even SIGKILL ends the process that
waits for it.  Linux's `include/uapi/linux/fuse.h` has the structures.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["HangingDisk", "hanging_disk"]

_HEADER = struct.Struct("<IIQQIIIHH")
_READ_SIZE = 2**20 + 2**16
_DIRECT = 1  # FOPEN_DIRECT_IO: the kernel keeps no pages, so each read asks the server
_DIRENT_ALIGN = 8


class HangingDisk:
    """The side of the test.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        command = [sys.executable, __file__, str(path)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hang(self) -> None:
        """Take every call from now on, and answer none; returns once that is so."""
        self._tell(b"h")

    def go_on(self) -> None:
        """Answer all calls that wait, and all further ones."""
        self._tell(b"g")

    def num_waiting(self) -> int:
        """Calls that wait for an answer."""
        return int(self._tell(b"n"))

    def is_mounted(self) -> bool:
        return self._line() == b"mounted"

    def end(self) -> None:
        """Calls that wait fail."""
        self._server.kill()
        self._server.communicate()
        subprocess.run(["umount", "--lazy", str(self.path)], check=False)

    def _tell(self, what: bytes) -> bytes:
        assert self._server.stdin is not None
        self._server.stdin.write(what)
        self._server.stdin.flush()
        return self._line()

    def _line(self) -> bytes:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()


@contextmanager
def hanging_disk(path: Path) -> Iterator[HangingDisk]:
    """An empty one at a new folder; skips the test if this user cannot mount one."""
    path.mkdir()
    disk = HangingDisk(path)
    try:
        if not disk.is_mounted():
            pytest.skip("only root can mount a file system, and only where there is /dev/fuse")
        yield disk
    finally:
        disk.end()


class _Node:
    """A file or folder."""

    def __init__(self, mode: int) -> None:
        self.mode, self.data, self.children = mode, bytearray(), dict[bytes, int]()


class _Server:
    """Answers the kernel from memory."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._nodes = {1: _Node(stat.S_IFDIR | 0o700)}
        self._waiting: list[bytes] = []
        self._hangs = False
        self._calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: lambda node, rest: self._entry(self._child(node, rest)),
            3: lambda node, rest: self._attributes(node),
            4: self._set_attributes,
            9: lambda node, rest: self._entry(self._add(node, rest[8:], stat.S_IFDIR | 0o700)),
            10: self._remove,
            11: self._remove,
            12: lambda node, rest: self._rename(node, rest, 8),
            14: lambda node, rest: struct.pack("<QII", 0, _DIRECT, 0),
            15: self._read,
            16: self._write,
            17: lambda node, rest: struct.pack("<5Q4I24x", 2**20, 2**20, 2**20, 2**20, 2**20, 4096, 255, 4096, 0),
            18: lambda node, rest: b"",
            25: lambda node, rest: b"",
            26: lambda node, rest: struct.pack("<IIIIHHIIHHI28x", 7, 31, 2**17, 1 << 5, 64, 48, 2**20, 1, 256, 0, 0),
            27: lambda node, rest: bytes(16),
            28: self._list,
            29: lambda node, rest: b"",
            35: self._create,
            45: lambda node, rest: self._rename(node, rest, 16),
        }

    def run(self) -> None:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._device, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == self._device:
                    try:
                        self._take(os.read(self._device, _READ_SIZE))
                    except OSError as error:
                        if error.errno == errno.ENODEV:
                            return
                elif not self._obey(os.read(0, 1)):
                    return

    def _obey(self, what: bytes) -> bool:
        if what == b"n":
            print(len(self._waiting), flush=True)
            return True
        self._hangs = what == b"h"
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._take(call)
        print("done", flush=True)
        return bool(what)

    def _take(self, call: bytes) -> None:
        _, kind, unique, node, *_ = _HEADER.unpack_from(call)
        if kind in (2, 42, 36):  # it forgets an entry, or interrupts a call: no answer is wanted
            return
        if self._hangs:
            self._waiting.append(call)
            return
        try:
            error, answer = 0, self._calls[kind](node, call[_HEADER.size :])
        except KeyError:
            error, answer = errno.ENOSYS if kind not in self._calls else errno.ENOENT, b""
        except OSError as failure:
            error, answer = failure.errno or errno.EIO, b""
        try:
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)
        except OSError as failure:
            if failure.errno != errno.ENOENT:  # the caller was ended meanwhile
                raise

    def _child(self, node: int, name: bytes) -> int:
        return self._nodes[node].children[name.split(b"\0")[0]]

    def _add(self, node: int, name: bytes, mode: int) -> int:
        key, number = name.split(b"\0")[0], max(self._nodes) + 1
        if key in self._nodes[node].children:
            raise FileExistsError(errno.EEXIST, "exists")
        self._nodes[number], self._nodes[node].children[key] = _Node(mode), number
        return number

    def _attributes_of(self, number: int) -> bytes:
        node, now = self._nodes[number], int(time.time())
        sizes = number, len(node.data), -(-len(node.data) // 512), now, now, now, 0, 0, 0
        return struct.pack("<6Q3I7I", *sizes, node.mode, 1, os.geteuid(), os.getegid(), 0, 4096, 0)

    def _entry(self, number: int) -> bytes:
        return struct.pack("<4QII", number, 0, 0, 0, 0, 0) + self._attributes_of(number)

    def _attributes(self, number: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes_of(number)

    def _set_attributes(self, node: int, rest: bytes) -> bytes:
        valid, _, size = struct.unpack_from("<QQQ", rest)
        if valid & 8:
            data = self._nodes[node].data
            data[size:] = bytes(max(0, size - len(data)))
        return self._attributes(node)

    def _remove(self, node: int, rest: bytes) -> bytes:
        del self._nodes[node].children[rest.split(b"\0")[0]]
        return b""

    def _rename(self, node: int, rest: bytes, size: int) -> bytes:
        (to,) = struct.unpack_from("<Q", rest)
        old, new = rest[size:].split(b"\0")[:2]
        self._nodes[to].children[new] = self._nodes[node].children.pop(old)
        return b""

    def _create(self, node: int, rest: bytes) -> bytes:
        return self._entry(self._add(node, rest[16:], stat.S_IFREG | 0o600)) + struct.pack("<QII", 0, _DIRECT, 0)

    def _read(self, node: int, rest: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", rest)
        return bytes(self._nodes[node].data[offset : offset + size])

    def _write(self, node: int, rest: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", rest)
        self._nodes[node].data[offset : offset + size] = rest[40 : 40 + size]
        return struct.pack("<II", size, 0)

    def _list(self, node: int, rest: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", rest)
        entries = b""
        for index, (name, number) in list(enumerate(self._nodes[node].children.items()))[offset:]:
            kind = stat.S_IFMT(self._nodes[number].mode) >> 12
            entry = struct.pack("<QQII", number, index + 1, len(name), kind) + name
            entry += bytes(-len(entry) % _DIRENT_ALIGN)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries


def _serve(path: str) -> int:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40700,user_id={os.geteuid()},group_id={os.getegid()},allow_other"
    if ctypes.CDLL(None).mount(b"hanging", path.encode(), b"fuse", 0, options.encode()):
        return 1
    print("mounted", flush=True)
    _Server(device).run()
    return 0


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))
