"""A capture that fails leaves nothing behind; torch's accounts of memory pools are simulated version by version."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from inflight.runner import capture
from inflight.runner.capture import CudaCapturer

SYNC_MODES = {"default": 0, "warn": 1, "error": 2}


class Allocator:
    """CUDACachingAllocator as far as captures go; `released` are pools whose memory `empty_cache` returns."""

    def __init__(self) -> None:
        self.recording: list[Any] = []
        self.users: dict[Any, int] = {}
        self.released: list[Any] = []

    def begin(self, pool: Any) -> None:
        self.users[pool] += 1
        assert pool not in self.recording, "beginAllocateToPool: already recording to mempool_id"
        self.recording.append(pool)

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0
        if not self.users[pool]:
            self.released.append(pool)


class Torch:
    """torch.cuda of a version; versions differ in the end and the release of a pool whose capture fails.

    Attributes:
        begin_fails, end_fails: make the next capture fail in CUDA's own calls.
    """

    def __init__(self, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version = version
        self.allocator = allocator = Allocator()
        self.mode = 0
        self.begin_fails = self.end_fails = False
        self._ids = itertools.count(1)
        cuda = self

        class MemPool:
            def __init__(self) -> None:
                self.id = 0, next(cuda._ids)
                allocator.users[self.id] = 1

            def use_count(self) -> int:
                return allocator.users[self.id]

            def __del__(self) -> None:
                assert not allocator.recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
                allocator.release(0, self.id)

        class CUDAGraph:
            def __init__(self) -> None:
                self.begun: Any = None
                self.capturing = self.ended = False

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                allocator.begin(pool)
                self.begun = pool
                if cuda.begin_fails:
                    raise RuntimeError("cudaStreamBeginCapture")
                self.capturing = True

            def capture_end(self) -> None:
                failed, self.capturing = not self.capturing or cuda.end_fails, False
                if self.begun is None or (failed and cuda.version == "2.11"):
                    raise RuntimeError("cudaStreamEndCapture")
                allocator.end(0, self.begun)
                if failed:
                    raise RuntimeError("cudaStreamEndCapture")
                self.ended = True

            def reset(self) -> None:
                if self.begun is not None and (self.ended or cuda.version == "2.14"):
                    allocator.release(0, self.begun)
                self.begun = None

            def __del__(self) -> None:
                self.reset()

            def replay(self) -> None:
                assert self.ended

        for name, value in dict(
            MemPool=MemPool,
            CUDAGraph=CUDAGraph,
            Stream=lambda device: self,
            stream=lambda stream: contextlib.nullcontext(),
            current_stream=lambda device: self,
            current_device=lambda: 0,
            synchronize=lambda device: None,
            get_sync_debug_mode=lambda: self.mode,
            set_sync_debug_mode=self.set_mode,
        ).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(capture, "_cuda_endAllocateToPool", allocator.end)
        monkeypatch.setattr(capture, "_cuda_releasePool", allocator.release)

    def wait_stream(self, stream: Any) -> None:
        """Part of a stream."""

    def set_mode(self, mode: int | str) -> None:
        self.mode = SYNC_MODES[mode] if isinstance(mode, str) else mode

    def read(self) -> tuple[()]:
        """A launch in which the host waits for the device."""
        if self.mode == SYNC_MODES["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return ()


@pytest.fixture(params=["2.11", "2.12", "2.14"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    return Torch(request.param, monkeypatch)


def out_of_memory() -> tuple[()]:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("failing", ["launch", "begin", "end"])
@pytest.mark.parametrize("has_others", [False, True])
def test_a_failed_capture_leaves_the_allocator_as_it_was(cuda: Torch, failing: str, has_others: bool) -> None:
    allocator, capturer = cuda.allocator, CudaCapturer(torch.device("cuda"))
    beside = capturer.capture(tuple, None) if has_others else None
    users = dict(allocator.users)
    cuda.begin_fails, cuda.end_fails = failing == "begin", failing == "end"
    launch: Callable[[], tuple[()]] = out_of_memory if failing == "launch" else tuple
    with pytest.raises(RuntimeError, match=dict(launch="out of memory", begin="Begin", end="End")[failing]):
        capturer.capture(launch, beside)
    cuda.begin_fails = cuda.end_fails = False
    assert not allocator.recording
    assert {pool: count for pool, count in allocator.users.items() if count} == users
    assert bool(allocator.released) == (not has_others), "memory that no graph uses returns to the device"
    capturer.capture(tuple, beside).replay()


def test_graphs_share_a_pool_that_the_last_of_them_releases(cuda: Torch) -> None:
    capturer = CudaCapturer(torch.device("cuda"))
    first = capturer.capture(tuple, None)
    second = capturer.capture(tuple, first)
    assert list(cuda.allocator.users.values()) == [3]
    del first
    assert not cuda.allocator.released
    del second
    assert len(cuda.allocator.released) == 1


@pytest.mark.parametrize("mode", [0, 1])
def test_a_launch_that_waits_fails_when_it_warms_up(cuda: Torch, mode: int) -> None:
    """The first time it may: to compile, to allocate."""
    capturer, modes = CudaCapturer(torch.device("cuda")), []
    cuda.mode = mode
    capturer.warm_up(lambda: modes.append(cuda.mode) or ())
    assert modes == [mode, 2]
    assert cuda.mode == mode
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        capturer.warm_up(cuda.read)
    assert cuda.mode == mode
