"""LMCache's multiprocess server as far as a KV store needs it: `python fake_lmcache.py --port P --shm-name NAME ...`.

What it answers is what version 0.5.6 answers (`lmcache/v1/multiprocess/modules/`); objects are evicted in the order of
their use, and there is no medium but the shared memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
from collections import OrderedDict
from typing import Any

import msgspec
import zmq

Object = tuple[str, tuple[int, ...]]  # model, tokens up to its end
_NAMES = {8: "lookup", 9: "query", 12: "free", 13: "end", 14: "register", 15: "unregister", 16: "prepare_store"}
_NAMES |= {17: "commit_store", 18: "prepare_retrieve", 19: "commit_retrieve", 21: "chunk"}


class Server:
    """The operations.  A `KeyError` or `ValueError` in one of them is not answered, as there."""

    def __init__(self, shm_name: str, size: int, chunk_tokens: int) -> None:
        self.shm_name, self.size, self.chunk_tokens = f"lmcache_l1_pool_{shm_name}", size, chunk_tokens
        path = f"/dev/shm/{self.shm_name}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, size)
        self.memory = mmap.mmap(descriptor, size)
        self.models: dict[int, tuple[str, int]] = {}  # instance -> model, bytes of an object
        self.objects: OrderedDict[Object, int] = OrderedDict()  # -> offset
        self.locks: dict[Object, int] = {}
        self.found: dict[str, list[Object]] = {}
        self.writes: dict[tuple[int, Object], list[Object]] = {}
        self.reads: dict[tuple[int, Object], list[Object]] = {}
        self.free: list[int] = []

    def register(self, payload: dict[str, Any]) -> dict[str, Any]:
        size = payload["num_layers"] * payload["num_physical_slots"] * payload["hidden_dim_size"]
        assert payload["use_mla"] and payload["dtype_str"] == "uint8"
        if not self.models:
            self.free = list(range(0, self.size - size + 1, size))
        self.models[payload["instance_id"]] = payload["model_name"], size
        return {"shm_name": self.shm_name, "pool_size": self.size}

    def unregister(self, instance: int) -> None:
        self.models.pop(instance, None)

    def chunk(self) -> int:
        return self.chunk_tokens

    def lookup(self, key: dict[str, Any], _: int) -> None:
        assert key["num_kv_readers"] == 1 and key["worker_id"] is None
        names = self._names(key) if any(key["model_name"] == model for model, _ in self.models.values()) else []
        has = [name for name in names if name in self.objects and not self._is_written(name)]
        count = next((index for index, name in enumerate(names) if name not in has), len(names))
        self.found[key["request_id"]] = names[:count]
        for name in names[:count]:
            self.locks[name] = self.locks.get(name, 0) + 1

    def query(self, session: str) -> int:
        return len(self.found.get(session, []))

    def free_locks(self, key: dict[str, Any], _: int) -> None:
        self._unlock(self.found[key["request_id"]])

    def end(self, session: str) -> None:
        for name in self.found.pop(session, []):
            if name in self.objects:
                self.objects.move_to_end(name)

    def prepare_store(self, key: dict[str, Any], instance: int) -> dict[str, Any]:
        _, size = self.models[instance]
        names, slots, numbers = self._names(key), [], []
        for number, name in enumerate(names):
            if name not in self.objects and (offset := self._place()) is not None:
                self.objects[name] = offset
                self.writes.setdefault((instance, names[-1]), []).append(name)
                slots.append({"offset": offset, "length": size, "shape": [1, 1, size], "dtype": "uint8"})
                numbers.append(number)
        return {"context": {"slots": slots, "chunk_indices": numbers}}

    def commit_store(self, key: dict[str, Any], instance: int, data: bytes) -> bool:
        assert data == b""
        return self.writes.pop((instance, self._names(key)[-1]), None) is not None

    def prepare_retrieve(self, key: dict[str, Any], instance: int) -> dict[str, Any]:
        _, size = self.models[instance]
        names = self._names(key)
        if not all(self.locks.get(name) for name in names):
            return {"success": False, "data": b"", "context": {}}
        self.reads[instance, names[-1]] = names
        slots = [{"offset": self.objects[one], "length": size, "shape": [], "dtype": "uint8"} for one in names]
        return {"success": True, "data": b"", "context": {"slots": slots}}

    def commit_retrieve(self, key: dict[str, Any], instance: int) -> bool:
        self._unlock(self.reads.pop((instance, self._names(key)[-1]), []))
        return True

    def _names(self, key: dict[str, Any]) -> list[Object]:
        tokens, size = key["token_ids"], self.chunk_tokens
        return [(key["model_name"], tuple(tokens[:end])) for end in range(size, key["end"] + 1, size)]

    def _is_written(self, name: Object) -> bool:
        return any(name in names for names in self.writes.values())

    def _unlock(self, names: list[Object]) -> None:
        for name in names:
            self.locks[name] -= 1

    def _place(self) -> int | None:
        if not self.free:
            unused = (one for one in self.objects if not self.locks.get(one) and not self._is_written(one))
            if (oldest := next(unused, None)) is None:
                return None
            self.free.append(self.objects.pop(oldest))
        return self.free.pop()


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, kind in (("port", int), ("shm-name", str), ("l1-size-gb", float), ("chunk-size", int)):
        parser.add_argument(f"--{option}", type=kind, default=256)
    options, _ = parser.parse_known_args()
    server = Server(options.shm_name, int(options.l1_size_gb * 2**30), options.chunk_size)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{options.port}")
    while True:
        peer, number, operation, *arguments = socket.recv_multipart()
        name = _NAMES[msgspec.msgpack.decode(operation)]
        work = server.free_locks if name == "free" else getattr(server, name)
        try:
            result = work(*map(msgspec.msgpack.decode, arguments))
        except (KeyError, ValueError, AssertionError):
            continue
        socket.send_multipart([peer, number, operation, *([] if result is None else [msgspec.msgpack.encode(result)])])


if __name__ == "__main__":
    main()
