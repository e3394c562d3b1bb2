"""Clients that many use, unchanged, against the gateway in front of a real tritonserver with a real model.

Each runs in a process of its own, in an environment that has none of the project's packages, with tests written
against its public interface: `python/*.py` and `node/*.mjs`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, HERE, KEY, Client, outcomes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.xdist_group("clients")]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_what_the_page_says_of_a_client_works(client: Client, gateway: str, tmp_path: Path) -> None:
    if client.missing:
        pytest.skip(client.missing)
    report = tmp_path / "report.xml"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON"))}
    asked = {
        "INFLIGHT_CLIENTS_URL": gateway.removesuffix("/v1"),
        "INFLIGHT_CLIENTS_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it fetches prices of models at import otherwise
    }
    done = subprocess.run(
        client.command(report), cwd=HERE / Path(client.file).parent, env=environment | asked, capture_output=True,
        text=True,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found = outcomes(report)
    assert not any(found.values()), f"{found}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
    assert set(found) == client.features()
