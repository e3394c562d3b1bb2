"""Instances that share an engine load the same adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from inflight.frontend.adapters.peers import AdapterPeers


class Group:
    """Instances that hear one another, as through `EngineGroup`."""

    def __init__(self, count: int, seconds: float) -> None:
        self.followed: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.fails: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.members = [
            AdapterPeers(partial(self._follow, k), partial(self._tell, k), count - 1, seconds) for k in range(count)
        ]
        for member in self.members:
            member.start()

    def _follow(self, k: int, change: Mapping[str, Any]) -> bool:
        self.gate.wait(20)
        self.followed[k].append(dict(change))
        return k not in self.fails

    def _tell(self, sender: int, text: str) -> None:
        for k, member in enumerate(self.members):
            if k != sender:
                member.told(text)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(3, 20.0)
    yield group
    group.gate.set()
    for member in group.members:
        member.stop()


def test_the_answer_waits_until_all_have_followed(group: Group) -> None:
    change = {"load": "doll", "id": "0" * 32, "path": "/kept/1"}
    assert group.members[1].tell(change) == 2
    assert group.followed == [[change], [], [change]]


def test_two_at_the_same_time_do_not_wait_for_each_other(group: Group) -> None:
    group.gate.clear()
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda k=k: counts.append(group.members[k].tell({"unload": str(k)}))) for k in (0, 1)
    ]
    for thread in threads:
        thread.start()
    group.gate.set()
    for thread in threads:
        thread.join(20)
    assert counts == [2, 2]


def test_those_that_cannot_follow_are_not_counted() -> None:
    group = Group(3, 60.0)
    group.fails = {2}
    changed = group.members[0]._changed

    def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
        """Until the one that can follow has, and then no longer, as if the time was over."""
        assert seconds == 60.0
        threading.Condition.wait_for(changed, lambda: 1 in group.members[0]._done.values(), seconds)
        return condition()

    changed.wait_for = wait_for  # type: ignore[method-assign]
    assert group.members[0].tell({"unload": "doll"}) == 1
    assert not group.members[0]._done
    for member in group.members:
        member.stop()


def test_one_instance_alone_does_not_wait() -> None:
    assert AdapterPeers(lambda change: True, lambda text: None, 0).tell({"unload": "x"}) == 0
