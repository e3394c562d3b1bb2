"""How the attention kernel's work is shared out: the plan kernel, in the Triton language's interpreter.

tests/gpu runs attention by such plans on a device.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from attention_cases import spec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged_case import PagedCase

pytest.importorskip("triton")

from inflight.kernels.gpu import gpu_attention
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import SCRATCH_BYTES, Card, Geometry, Room, Tile, room_for
from inflight.kernels.gpu.gpu_attention_plan import HEADER, NUM_OPTIONS, plan_kernel
from inflight.kernels.gpu.launch import interpreted

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
]

# Llama 3 8B: 8 KV heads for 32 query heads of 128.
DECODE = Geometry(Tile(0, 64, 4, 3), group=4, num_kv_heads=8, value_padded=128, window=0)
MIXED = Geometry(Tile(128, 64, 8, 3), group=4, num_kv_heads=8, value_padded=128, window=0)
DECODES_AT_ONCE = 3 * 132  # on an H200, whose SMs run three programs of DECODE's tile
MIXES_AT_ONCE = 132
UNWRITTEN = -7


@dataclass
class Plan:
    """The plan that the kernel wrote.

    Attributes:
        items: (request, query block, part, number of parts).
        joins: the first items of the query blocks that are split.
    """

    items: list[tuple[int, ...]]
    joins: list[int]

    def parts_of(self, request: int) -> set[int]:
        return {item[3] for item in self.items if item[0] == request}


def launch(room: Room, geometry: Geometry, seq_lens: list[int], query_lens: list[int], running: int) -> Plan:
    plan = torch.full((HEADER.value + 4 * room.items + room.extra + 64,), UNWRITTEN, dtype=torch.int32)
    plan_kernel[(1,)](
        torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        plan,
        len(seq_lens),
        room.items,
        room.extra,
        running,
        geometry.num_kv_heads,
        geometry.block_q,
        geometry.tile.block_n,
        geometry.window or 2**30,
        CHUNK=16,  # several chunks
        OPTIONS=NUM_OPTIONS,
    )
    num_items, num_joins = plan[:2].tolist()
    assert num_items <= room.items and num_joins <= min(room.extra, room.blocks)
    items, joins = plan[HEADER.value :].split([4 * room.items, room.extra + 64])
    assert (items[4 * num_items :] == UNWRITTEN).all() and (joins[num_joins:] == UNWRITTEN).all()
    return Plan(list(map(tuple, items[: 4 * num_items].view(-1, 4).tolist())), joins[:num_joins].tolist())


def room_of(geometry: Geometry, query_lens: list[int], running: int) -> Room:
    return room_for(geometry, sum(query_lens), len(query_lens), max(query_lens), running)


def plan_of(geometry: Geometry, seq_lens: list[int], query_lens: list[int], running: int = DECODES_AT_ONCE) -> Plan:
    return launch(room_of(geometry, query_lens, running), geometry, seq_lens, query_lens, running)


def decode(seq_lens: list[int], running: int = DECODES_AT_ONCE) -> Plan:
    return plan_of(DECODE, seq_lens, [1] * len(seq_lens), running)


def tiles_of(item: tuple[int, ...], seq_lens: list[int]) -> int:
    request, _, part, parts = item
    tiles = -(-seq_lens[request] // DECODE.tile.block_n)
    return tiles * (part + 1) // parts - tiles * part // parts


def estimate(works: list[int], running: int) -> int:
    """Time until the last of 8 heads' programs ends, in tiles: each starts when one before it ends, and costs 2."""
    until = [0] * running
    for work in works:
        for _ in range(DECODE.num_kv_heads):
            heapq.heappushpop(until, until[0] + work + 2)
    return max(until)


class TestDecodes:
    def test_keys_are_not_split_if_the_card_is_busy(self) -> None:
        for seq_lens in ([2048] * 99, [1024] * 256, [300] * 700):
            plan = decode(seq_lens)
            assert not plan.joins
            assert sorted(plan.items) == [(request, 0, 0, 1) for request in range(len(seq_lens))]

    @pytest.mark.parametrize(("requests", "length"), [(1, 32768), (1, 131072), (8, 16384), (3, 4096), (30, 8192)])
    def test_few_long_contexts_are_split_to_fill_the_card(self, requests: int, length: int) -> None:
        seq_lens = [length] * requests
        plan = decode(seq_lens)
        works = [tiles_of(item, seq_lens) for item in plan.items]
        assert sum(works) == requests * length // 64
        busy = DECODE.num_kv_heads * sum(works) / DECODES_AT_ONCE
        assert estimate(works, DECODES_AT_ONCE) <= 1.3 * busy + 5

    def test_one_long_context_among_short_ones_gets_its_parts(self) -> None:
        """128K tokens beside 255 requests of 1K, at any place.

        With scratch for 16 rows of every request it got two parts, and the card waited for programs of 1,024 tiles.
        """
        for place in (0, 100, 255):
            seq_lens = [1024] * 256
            seq_lens[place] = 131072
            plan = decode(seq_lens)
            (parts,) = plan.parts_of(place)
            assert parts == 40
            assert all(plan.parts_of(request) == {1} for request in range(256) if request != place)
            now = estimate([tiles_of(item, seq_lens) for item in plan.items], DECODES_AT_ONCE)
            before = estimate([16] * 255 + [1024] * 2, DECODES_AT_ONCE)
            assert before / now > 7, (before, now)
            floor = DECODE.num_kv_heads * (255 * 16 + 2048) / DECODES_AT_ONCE
            assert now < 1.25 * floor

    def test_room_and_scratch_follow_from_the_size_of_the_batch(self) -> None:
        room = room_for(DECODE, 256, 256, 1, DECODES_AT_ONCE)
        assert room == Room(blocks=256, extra=50, rows=4)
        assert room_for(DECODE, 1, 1, 1, DECODES_AT_ONCE) == Room(1, 98, 4)
        assert 2 * room.extra * 8 * room.rows * 128 * 4 < 2 * 2**20, "bytes; 16 rows for each request took 32 MiB"
        assert room_for(DECODE, 1024, 256, 4, DECODES_AT_ONCE).rows == 16, "draft tokens"

    @pytest.mark.parametrize("extra", range(6))
    def test_little_room_means_few_parts(self, extra: int) -> None:
        """As when the scratch is small: `launch` checks that the items fit."""
        plan = launch(Room(2, extra, 4), DECODE, [100_000, 1], [1, 1], DECODES_AT_ONCE)
        assert plan.parts_of(0) == {extra + 1}

    def test_one_room_serves_any_lengths(self) -> None:
        """As in a captured launch, whose padding has no tokens."""
        room = room_of(DECODE, [1] * 8, DECODES_AT_ONCE)
        for seq_lens in ([1] * 8, [70000, 1, 1, 1, 1, 1, 1, 1], [9000] * 3 + [0] * 5, [0] * 8):
            query_lens = [min(length, 1) for length in seq_lens]
            plan = launch(room, DECODE, seq_lens, query_lens, DECODES_AT_ONCE)
            assert {item[0] for item in plan.items} == {row for row, length in enumerate(seq_lens) if length}
            assert bool(plan.joins) == (max(seq_lens) > 1000)


class TestMixes:
    def test_a_prompt_that_fills_the_card_is_not_split_and_starts_with_its_end(self) -> None:
        plan = plan_of(MIXED, [8192], [8192], MIXES_AT_ONCE)
        assert plan.items == [(0, block, 0, 1) for block in reversed(range(256))]

    def test_a_short_chunk_at_a_long_context_is_split(self) -> None:
        plan = plan_of(MIXED, [16384], [64], MIXES_AT_ONCE)
        assert plan.parts_of(0) == {8} and len(plan.joins) == 2

    def test_one_long_context_beside_a_prompt_is_split_and_starts_first(self) -> None:
        plan = plan_of(MIXED, [2048, 60000], [2048, 1], MIXES_AT_ONCE)
        (parts,) = plan.parts_of(1)
        assert parts > 8 and plan.parts_of(0) == {1}
        assert plan.items[:parts] == [(1, 0, part, parts) for part in range(parts)]
        assert plan.items[parts:] == [(0, block, 0, 1) for block in reversed(range(64))]


@settings(max_examples=10, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 140_000), st.integers(0, 3000)), min_size=1, max_size=40),
    geometry=st.sampled_from([DECODE, MIXED]),
    running=st.sampled_from([4, 132, 396, 2000]),
    window=st.sampled_from([0, 4096]),
    value_padded=st.sampled_from([64, 256]),
)
@example([(5, 0), (9, 0)], DECODE, 132, 0, 64)
@example([(131072, 3000)] + [(3000, 3000)] * 39, MIXED, 2000, 0, 256)
def test_every_query_block_is_computed_once_and_fits(requests, geometry, running, window, value_padded) -> None:
    geometry = replace(geometry, window=window, value_padded=value_padded)
    seq_lens = [length for length, _ in requests]
    query_lens = [min(length, count if geometry.tile.block_m else min(count, 1)) for length, count in requests]
    room = room_for(geometry, sum(query_lens), len(query_lens), max(query_lens) or 1, running)
    plan = launch(room, geometry, seq_lens, query_lens, running)
    parts = [plan.parts_of(request) for request in range(len(seq_lens))]
    assert all(len(found) == (count > 0) for found, count in zip(parts, query_lens)), "of equal number in all blocks"
    assert sorted(plan.items) == [
        (request, block, part, max(parts[request]))
        for request, count in enumerate(query_lens)
        for block in range(-(-count // geometry.block_q))
        for part in range(max(parts[request]))
    ]
    split = [item for item in plan.items if item[3] > 1]
    assert plan.items[: len(split)] == split, "parts come first: an item's number is its place in the scratch"
    assert len(split) <= 2 * room.extra
    assert 2 * room.extra * geometry.num_kv_heads * room.rows * value_padded * 4 <= SCRATCH_BYTES
    assert sorted(plan.joins) == [place for place, item in enumerate(split) if item[2] == 0]
    for first in plan.joins:
        request, block, _, count = plan.items[first]
        assert plan.items[first : first + count] == [(request, block, part, count) for part in range(count)]


def test_each_step_is_planned_once_per_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is prepared; attention then plans nothing."""
    rooms = []
    monkeypatch.setattr(gpu_attention, "room_for", lambda *args: rooms.append(room_for(*args)) or rooms[-1])
    case = PagedCase(spec(2, 1, 16), [20], [1], 16)
    windowed = replace(case, spec=replace(case.spec, sliding_window=5))
    backend = GpuAttention(Card((9, 0), 2, 227 * 1024))
    layers = [(part, part.filled_cache(backend)) for part in (case, windowed, case)]
    for _ in range(2):
        rooms.clear()
        batch = case.prepared(backend)
        assert len(rooms) == 2
        for layer, cache in layers:
            backend.attend(layer.query, cache, batch, layer.spec, None)
        assert len(rooms) == 2
