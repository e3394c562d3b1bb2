"""Consistent hashing with bounded loads."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_gateway.affinity import BoundedRing, Choice, key_of

NAMES = [f"10.0.0.{number}:8001" for number in range(1, 6)]
KEYS = [key_of([str(number)]) for number in range(2000)]
IDLE = dict.fromkeys(range(len(NAMES)), 0)


def homes(ring: BoundedRing, loads: dict[int, int]) -> dict[str, int]:
    return {key: ring.choose(key, loads).server for key in KEYS}


def test_keys_are_spread_and_everybody_agrees_on_their_homes() -> None:
    """The order in which servers are given does not matter, as long as they have the same names."""
    found = homes(BoundedRing(NAMES), IDLE)
    assert min(Counter(found.values()).values()) > len(KEYS) / len(NAMES) / 2
    other = BoundedRing(NAMES[::-1])
    assert {key: len(NAMES) - 1 - server for key, server in homes(other, IDLE).items()} == found


def test_a_server_that_leaves_moves_only_its_own_keys_and_they_return_with_it() -> None:
    ring = BoundedRing(NAMES)
    before = homes(ring, IDLE)
    without = {server: 0 for server in IDLE if server != 2}
    during = homes(ring, without)
    assert all(during[key] == server for key, server in before.items() if server != 2)
    moved = Counter(during[key] for key, server in before.items() if server == 2)
    assert set(moved) == set(without), "its keys are spread over all others"
    assert {ring.choose(key, without).why for key, server in before.items() if server == 2} == {"failover"}
    assert homes(ring, IDLE) == before


def test_a_hot_key_takes_one_server_more_at_a_time() -> None:
    """Spill-over follows one order, so that few servers compute a prefix."""
    ring = BoundedRing(NAMES, load_factor=1.5, never_full=4)
    loads, order, used = dict(IDLE), [], []
    for _ in range(400):
        server, why = ring.choose(KEYS[0], loads)
        assert (why == "home") == (server == (used or [server])[0])
        if server not in order:
            order.append(server)
            assert all(loads[one] >= 4 for one in order[:-1])
        used.append(server)
        loads[server] += 1
        assert loads[server] <= max(4, math.ceil(1.5 * sum(loads.values()) / len(loads)))
    assert len(order) >= 4
    again = dict(IDLE)
    for server in used:
        assert ring.choose(KEYS[0], again).server == server
        again[server] += 1


@given(
    st.dictionaries(st.integers(0, 4), st.integers(0, 500), min_size=1),
    st.text(),
    st.floats(1, 3),
    st.integers(0, 16),
)
def test_whatever_the_loads_some_server_is_chosen_and_it_is_not_full(
    loads: dict[int, int], key: str, factor: float, never_full: int
) -> None:
    ring = BoundedRing(NAMES, factor, never_full)
    found = ring.choose(key, loads)
    assert loads[found.server] < max(never_full, math.ceil(factor * (sum(loads.values()) + 1) / len(loads)))
    assert (found.why == "failover") == (ring.choose(key, IDLE).server not in loads)
    assert found == ring.choose(key, loads)


def test_one_server_gets_all() -> None:
    assert BoundedRing(["a"]).choose("key", {0: 1000}) == Choice(0, "home")


def test_a_key_is_of_all_parts_in_their_order() -> None:
    keys = [key_of(parts) for parts in (["a", "b"], ["b", "a"], ["ab"], ["", "ab"], ["a", "b", ""], ["\ud800"])]
    assert len(set(keys)) == len(keys)
    assert key_of(["a", "b"]) == keys[0]


@pytest.mark.parametrize(
    ("names", "factor", "said"), [([], 1.25, "at least one"), (["a", "a"], 1.25, "once"), (["a"], 0.9, "mean load")]
)
def test_what_makes_no_ring_is_refused(names: list[str], factor: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BoundedRing(names, factor)
