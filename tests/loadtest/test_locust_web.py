"""Locust's web UI starts swarms with the options, the host and the shape of its form."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import serving_openai

from inflight_tools.ports import pick_ports

ROOT = Path(__file__).parents[2]


class Locust:
    """A Locust with its web UI; `said` is its log so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (port,) = pick_ports(1)
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "locust.log"
        env = {key: value for key, value in os.environ.items() if not key.startswith(("LOCUST_", "OPENAI_"))}
        env |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]),
            "OPENAI_API_KEY": "the operator's",
        }
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")]
        command += ["--web-host", "127.0.0.1", "--web-port", str(port), *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ask(self, path: str, **form: Any) -> str:
        data = urllib.parse.urlencode(form).encode() if form else None
        with urllib.request.urlopen(self.url + path, data, timeout=30) as response:
            return str(response.read().decode())

    def statistics(self) -> dict[tuple[str, str], dict[str, str]]:
        """Not those of the page's own requests, which Locust answers alike for two seconds."""
        rows = csv.DictReader(io.StringIO(self.ask("/stats/requests/csv")))
        return {(row["Type"], row["Name"]): row for row in rows}

    def answered(self) -> int:
        row = self.statistics().get(("openai", "uniform"), {"Request Count": 0, "Failure Count": 0})
        return int(row["Request Count"]) - int(row["Failure Count"])

    def state(self) -> str:
        found = re.search(r'"state": ?"(\w+)"', self.ask("/"))
        assert found is not None
        return found[1]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not self._holds(holds):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)

    @staticmethod
    def _holds(holds: Callable[[], bool]) -> bool:
        try:
            return holds()
        except urllib.error.URLError:
            return False  # not up yet


@pytest.fixture
def locust(tmp_path: Path) -> Iterator[Locust]:
    started = Locust(tmp_path, "--scenario", "uniform")
    try:
        started.wait_until(lambda: bool(started.ask("/")))
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def test_swarms_from_the_web_ui(locust: Locust) -> None:
    page = locust.ask("/")
    for option in ("scenario", "shape", "kind", "model", "context", "arrivals", "api_key"):
        assert f'"{option}"' in page or f"&#34;{option}&#34;" in page or f'\\"{option}\\"' in page, option
    assert "ramp" in page and "the operator" not in page and '"record"' not in page

    swarm = {"user_count": 3, "spawn_rate": 3, "requests": 6, "model": "", "shape": "constant", "api_key": ""}
    with serving_openai() as first, serving_openai(models=("a", "b")) as second:
        assert json.loads(locust.ask("/swarm", host=first.url, **swarm))["success"]
        locust.wait_until(lambda: locust.answered() == 6 and locust.state() == "stopped")
        assert ("TTFT", "uniform") in locust.statistics()
        # The host of the form, with a model that it has; a ramp up to two users and down.
        before = len(first.bodies)
        form = {**swarm, "user_count": 2, "model": "b", "shape": "ramp", "requests": 4}
        assert json.loads(locust.ask("/swarm", host=second.url, **form))["success"]
        locust.wait_until(lambda: locust.answered() == 4 and locust.state() == "stopped")
        assert len(first.bodies) == before and {body["model"] for body in second.bodies} == {"b"}

        # Wrong input ends a swarm, and says why; the next one starts.
        locust.ask("/swarm", host=second.url, **swarm)
        locust.wait_until(lambda: locust.state() == "stopped" and "2 models" in locust.ask("/exceptions"))
        second.key = "the operator's"
        locust.ask("/swarm", host=second.url, **{**swarm, "model": "b"})
        locust.wait_until(lambda: "asks for an API key" in locust.ask("/exceptions"))
        locust.wait_until(lambda: locust.state() == "stopped")
        locust.ask("/swarm", host=second.url, **{**swarm, "model": "b", "api_key": "the operator's"})
        locust.wait_until(lambda: locust.answered() == 6)
