"""A fleet under Locust's users: a killed server and a rolling restart lose nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_fronts import REQUESTS, ROOT, client, requests, start_fronts, undisturbed
from model_entries import CHECKPOINT
from replicas import Answer, Fleet, Process

LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
REPLICAS = 3


@pytest.fixture
def fleet(triton_installed: None) -> Iterator[Fleet]:
    fleet = Fleet(REPLICAS)
    yield fleet
    fleet.close()


class Load(threading.Thread):
    """A user of each front, who asks one request after the other.

    Attributes:
        answered: how many answers each front has brought.
        failures: answers that are missing or not as expected.
    """

    def __init__(self, fronts: dict[str, Process], expected: list[Any]) -> None:
        super().__init__(name="load")
        self._fronts, self._expected = fronts, expected
        self._over = threading.Event()
        self.answered = dict.fromkeys(fronts, 0)
        self.failures: list[str] = []

    def run(self) -> None:
        asyncio.run(self._users())

    async def _users(self) -> None:
        async with client() as http:
            await asyncio.gather(*(self._user(http, front) for front in self._fronts))

    async def _user(self, http: httpx.AsyncClient, front: str) -> None:
        for number in itertools.cycle(requests(front)):
            if self._over.is_set():
                return
            try:
                answer = await Answer(self._fronts[front].url, *REQUESTS[number]).read(http)
                if answer != self._expected[number]:
                    self.failures.append(f"{front}, request {number}: another answer")
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{front}, request {number}: {error!r}")
            self.answered[front] += 1
            await asyncio.sleep(0.2)  # leaves the machine to the servers that start

    def wait_for_more(self) -> None:
        """Until every front has brought another answer."""
        before = dict(self.answered)
        while any(self.answered[front] <= count for front, count in before.items()):
            assert self.is_alive()
            threading.Event().wait(0.05)

    def end(self) -> None:
        self._over.set()
        self.join()


class Locust:
    """Locust's users before one front, each with one request after the other, from its creation to `rows`."""

    def __init__(self, front: Process, folder: Path, users: int = 1) -> None:
        folder.mkdir()
        self._record, self._log = folder / "record.jsonl", folder / "locust.log"
        options = {"host": front.url, "users": users, "spawn-rate": users, "stop-timeout": 120, "record": self._record}
        options |= {"scenario": "lognormal", "context": 256, "requests": -1, "prompt": "text", "tokenizer": CHECKPOINT}
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "OpenAIUser", "--headless"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def answered(self) -> int:
        return self._record.read_text().count('"index"') if self._record.exists() else 0

    def wait_for_more(self) -> None:
        before = self.answered
        while self.answered <= before:
            assert self._process.poll() is None, self._log.read_text()
            threading.Event().wait(0.05)

    def rows(self) -> list[dict[str, Any]]:
        """End the users when their requests have ended; one row for each request that was sent."""
        self._process.terminate()
        self._process.wait(150)
        lines = [json.loads(line) for line in self._record.read_text().splitlines()]
        rows = [line for line in lines if "index" in line]
        (sent,) = [line["sent"] for line in lines if "sent" in line]  # when the users were told to end
        assert {row["index"] for row in rows} == set(range(len(rows))) and len(rows) >= sent, "a request has not ended"
        return rows

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def wait_for_all(groups: Iterable[Load | Locust]) -> None:
    for users in groups:
        users.wait_for_more()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_under_locust_a_killed_server_and_a_rolling_restart_lose_and_change_nothing(
    fleet: Fleet, tmp_path: Path
) -> None:
    """One tritonserver dies and returns; then each replica drains, ends and returns, one after the other."""
    fronts = start_fronts(fleet, tmp_path)
    load = Load(fronts, undisturbed(fleet.gateways[0].url))
    crowds = [Locust(front, tmp_path / name) for name, front in fronts.items()]
    load.start()
    try:
        wait_for_all((load, *crowds))
        fleet.kill(0)
        fleet.revive(0)
        for index in range(REPLICAS):
            wait_for_all((load, *crowds))
            fleet.restart(index)
        wait_for_all((load, *crowds))
        load.end()
        rows = [row for crowd in crowds for row in crowd.rows()]
    finally:
        load.end()
        for crowd in crowds:
            crowd.kill()
    assert not load.failures, "\n".join(load.failures)
    assert not [row["error"] for row in rows if row["error"]]
    assert all(sum(count for _, count in row["arrivals"]) == row["output_tokens"] for row in rows)
