"""Steps as CUDA graphs: one call replays what an eager step launches kernel by kernel.

A graph is a list of kernels with their arguments as they were at its capture, addresses and host numbers alike.  So
varying data are in device tensors at fixed addresses, and host numbers depend on the bucket alone.
A step of T tokens is padded to the smallest bucket of at least T; rows that are added have no tokens (length 0), tokens
that are added are written to no KV slot (-1), and no token is chosen for them.

    tokens    1 | 2 | 3 4 | 5 .. 8 | 9 .. 16 | 17 .. 24 | ...
    bucket    1 | 2 |  4  |   8    |   16    |    24    | ...

With speculation, rows have up to k + 1 tokens, all with logits.  Such steps have buckets of their own, with as many
rows as tokens: whichever rows the tokens belong to, the graph is the same.

Steps with prompts of up to `max_cudagraph_capture_size` tokens, decodes beside them or not, have a third kind: few
sizes, each with room for a few rows and for all.  A row may have any number of the tokens.

With adapters (LoRA), every bucket has two graphs, and steps without adapters replay the one that launches nothing for
them.

One graph is the whole step: inputs, forward pass, sampling, and the tokens' way back into the device's state.  The
graphs share a memory pool, and are captured from the largest to the smallest, so that each finds enough memory
there: a graph's outputs are invalid once another graph is replayed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.attention.base import AttentionBackend
from inflight.byte_sizes import format_bytes
from inflight.config import EngineConfig
from inflight.device.memory import DeviceMeter
from inflight.load_phases import enter_phase
from inflight.loading.memory_plan import graph_bytes
from inflight.runner.capture import Capturer, Graph, Launch, capturer_of
from inflight.runner.step_inputs import StepSize

__all__ = ["DecodeGraphs", "Padding", "bucket_sizes", "decode_graphs", "decode_sizes", "draft_sizes", "mixed_sizes"]

_log = logging.getLogger(__name__)


class Padding(NamedTuple):
    """A step of nothing but padding.

    Attributes:
        key: of all steps that differ from this one in the contents of tensors only.
    """

    key: Hashable
    launch: Launch


# Up to so many tokens, buckets are so far apart.  The time of a decode hardly grows with its tokens while it reads
# mostly weights, so up to 7 tokens of padding cost little.  For up to 256 vLLM captures the same 35 sizes.
_WIDTHS = ((256, 8), (1024, 32), (2**31, 128))
# Steps with drafts of more tokens are eager: few are worth their time, and launching is little of it.
_MAX_DRAFT_STEP = 128
# Of steps with prompts: rows of the smaller bucket of two, and what of entering prompts finds room in one copy.
_FEW_ROWS = 16
_MAX_NEW_TOKENS, _MAX_NEW_BLOCKS = 2**14, 2**12


class _Buckets(NamedTuple):
    """By kind, in increasing order."""

    plain: list[StepSize]
    mixed: list[StepSize]
    drafting: list[StepSize]

    @classmethod
    def of(cls, sizes: Sequence[StepSize], adapted: bool) -> _Buckets:
        own = [size for size in sizes if size.adapted == adapted]
        return cls(
            [size for size in own if size.query_len == 1],
            [size for size in own if size.prompt_blocks],
            [size for size in own if size.query_len > 1 and not size.prompt_blocks],
        )


class DecodeGraphs:
    """The captured steps of a runner, of decodes and, if configured, of prompts; without any, every step is eager.

    Args:
        sizes: of the buckets.
        padding: makes a step of a bucket's size, whose tensors have their contents once it returns.
    """

    def __init__(
        self, sizes: Sequence[StepSize], padding: Callable[[StepSize], Padding], capturer: Capturer | None
    ) -> None:
        self._sizes = sorted(sizes, key=attrgetter("tokens", "rows", "adapted"))
        self._buckets = {adapted: _Buckets.of(self._sizes, adapted) for adapted in (False, True)}
        self._padding = padding
        self._capturer = capturer
        self._graphs: dict[Hashable, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def bucket(self, size: StepSize) -> StepSize | None:
        """The bucket for a step of `size`; None if no graph has room for it."""
        if not self._graphs:
            return None
        found, buckets = None, self._buckets[size.adapted]
        if size.query_len == 1 and not size.new_tokens:
            found = _bucket(buckets.plain, size)
        elif size.logits == size.tokens:
            found = _bucket(buckets.drafting, size)
        return found or _bucket(buckets.mixed, size)

    def replay(self, key: Hashable) -> tuple[Tensor, ...] | None:
        """Queue the step that was captured with `key` on the current stream; None if there is none.

        Returns:
            The step's outputs, which hold until the next replay.
        """
        graph = self._graphs.get(key)
        if graph is None:
            return None
        graph.replay()
        return graph.outputs

    @torch.inference_mode()
    def measure(self, meter: DeviceMeter) -> int:
        """Bytes that all graphs will take, judged by the two largest, which are captured and dropped."""
        if not self._sizes:
            return 0
        largest = [size for size in self._sizes if size.adapted == self._sizes[-1].adapted][-2:]
        try:
            self._warm_up(largest)
            marks = [meter.used()]
            for size in reversed(largest):
                self._capture([size])
                marks.append(meter.used())
        except Exception as error:
            self._run_eagerly(error)
            return 0
        finally:
            self._graphs.clear()
        return graph_bytes([after - before for before, after in pairwise(marks)], len(self._sizes))

    @torch.inference_mode()
    def capture(self, meter: DeviceMeter) -> int:
        """Capture all buckets; returns the bytes that they take."""
        if not self._sizes:
            return 0
        begun = time.perf_counter()
        enter_phase(f"capturing {len(self._sizes)} CUDA graphs")
        try:
            self._warm_up(self._sizes)
            before = meter.used()
            self._capture(self._sizes)
        except Exception as error:
            self._run_eagerly(error)
            return 0
        taken, seconds = max(0, meter.used() - before), time.perf_counter() - begun
        count, tokens = len(self._sizes), self._sizes[-1].tokens
        _log.info("%d CUDA graphs of up to %d tokens: %.1f s, %s", count, tokens, seconds, format_bytes(taken))
        return taken

    def _warm_up(self, sizes: Sequence[StepSize]) -> None:
        assert self._capturer is not None
        for size in reversed(sizes):
            self._capturer.warm_up(self._padding(size).launch)

    def _capture(self, sizes: Sequence[StepSize]) -> None:
        assert self._capturer is not None
        beside = next(iter(self._graphs.values()), None)
        with _collector_off():
            for size in reversed(sizes):
                key, launch = self._padding(size)
                self._graphs[key] = graph = self._capturer.capture(launch, beside)
                beside = beside or graph

    def _run_eagerly(self, error: Exception) -> None:
        """Any error means a model that works, but without graphs: it may read the contents of its tensors."""
        self._sizes = []
        self._graphs.clear()
        reason = (str(error).strip().splitlines() or [""])[0]
        _log.warning(
            "decode steps run without CUDA graphs, and slower: a step cannot be captured (%s: %s); set enforce_eager "
            "to true to save the attempt",
            type(error).__name__,
            reason,
        )


def _bucket(sizes: Sequence[StepSize], size: StepSize) -> StepSize | None:
    """Of those of `sizes` with the fewest tokens that are enough, the first with room for `size`."""
    index = bisect_left(sizes, size.tokens, key=attrgetter("tokens"))
    least = [found for found in sizes[index : index + 2] if found.tokens == sizes[index].tokens]
    return next((found for found in least if found.holds(size)), None)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection: memory that it frees on the device would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bucket_sizes(max_tokens: int) -> list[int]:
    """Tokens of each bucket, increasing; the last is `max_tokens`."""
    sizes = [tokens for tokens in (1, 2, 4) if tokens < max_tokens]
    tokens = 8
    for end, width in _WIDTHS:
        while tokens < min(end, max_tokens):
            sizes.append(tokens)
            tokens += width
    return [*sizes, max_tokens]


def decode_sizes(max_rows: int) -> list[StepSize]:
    """Of buckets for decode steps of up to `max_rows` rows."""
    return [StepSize(rows, rows, rows, 1) for rows in bucket_sizes(max_rows)]


def draft_sizes(max_rows: int, max_tokens: int, max_drafts: int) -> list[StepSize]:
    """Of buckets for steps of up to `max_rows` rows with up to `max_drafts` drafts each, and `max_tokens` in all."""
    query_len = max_drafts + 1
    most = min(max_rows * query_len, max_tokens, _MAX_DRAFT_STEP)
    if most < 2:
        return []
    return [
        StepSize(min(tokens, max_rows), tokens, tokens, query_len, tokens)
        for tokens in bucket_sizes(most)
        if tokens > 1
    ]


def mixed_sizes(max_rows: int, max_tokens: int, has_drafts: bool) -> list[StepSize]:
    """Of buckets for steps of up to `max_tokens` tokens and `max_rows` rows, with prompts, decodes and drafts."""
    counts = [tokens for tokens in (16, 32, 64, *range(128, max_tokens, 128)) if tokens < max_tokens]
    drafts = _MAX_DRAFT_STEP if has_drafts else 0
    return [
        StepSize(rows, tokens, min(tokens, rows + drafts), tokens, _MAX_NEW_TOKENS, _MAX_NEW_BLOCKS)
        for tokens in (*counts, max_tokens)
        for rows in sorted({min(_FEW_ROWS, tokens, max_rows), min(tokens, max_rows)})
    ]


def decode_graphs(
    config: EngineConfig,
    backend: AttentionBackend,
    device: torch.device,
    padding: Callable[[StepSize], Padding],
    capturable: bool = True,
    adapted: bool = False,
) -> DecodeGraphs:
    """Graphs for the steps that the configuration names, to be captured; none on a CPU or with `enforce_eager`.

    Args:
        capturable: whether the model launches the same for every batch of a size, its attention aside.
        adapted: whether rows can have adapters.
    """
    capturer = None if config.enforce_eager else capturer_of(device)
    if capturer is None:
        return DecodeGraphs((), padding, None)
    if not backend.capturable:
        _log.warning(
            "decode steps run without CUDA graphs, and slower: attention_backend=%r decides on the host what it "
            'launches; use "gpu", or set enforce_eager to true',
            backend.name,
        )
        return DecodeGraphs((), padding, None)
    if not capturable:
        _log.warning(
            "decode steps run without CUDA graphs, and slower: the model's rotary embedding has frequencies for every "
            "length; lower max_model_len to the checkpoint's max_position_embeddings, or set enforce_eager to true"
        )
        return DecodeGraphs((), padding, None)
    max_rows, max_tokens = config.max_num_seqs, config.step_tokens
    sizes = decode_sizes(min(max_rows, max_tokens))
    if config.speculative_config is not None:
        sizes += draft_sizes(max_rows, max_tokens, config.speculative_config.longest_draft)
    if mixed := min(config.max_cudagraph_capture_size, max_tokens):
        sizes += mixed_sizes(max_rows, mixed, config.speculative_config is not None)
    if adapted:
        sizes += [replace(size, adapted=True) for size in sizes]
    return DecodeGraphs(sizes, padding, capturer)
