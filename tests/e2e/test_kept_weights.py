"""Engines of a real tritonserver start from the weights that the first one has kept, and answer as it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_entries import killed_at_the_end, load, write_entry
from processes_of import engine_process
from typer.testing import CliRunner
from wire import post, wait_for

from inflight.loading.startup import REUSED
from inflight_tools.cli import app
from inflight_tools.launcher import TritonServer

IN_FULL = "reading the weights"


def answers(server: TritonServer, name: str) -> list[Any]:
    url = f"http://{server.http_address}/v2/models/{name}/generate"
    bodies: list[dict[str, Any]] = [
        {"text_input": "def main", "parameters": {"temperature": 0, "max_tokens": 24, "logprobs": 2}},
        {"text_input": "The list of", "parameters": {"temperature": 1, "seed": 5, "max_tokens": 24}},
    ]
    found = [post(url, body) for body in bodies]
    assert [status for status, _ in found] == [200, 200], found
    return [{**json.loads(answer), "model_name": ""} for _, answer in found]


def test_later_engines_use_what_the_first_has_kept(tmp_path: Path) -> None:
    repository, log = tmp_path / "models", tmp_path / "log"
    repository.mkdir()
    write_entry(repository, "first")
    write_entry(repository, "forked", max_num_seqs=5)
    write_entry(repository, "executed", spare_engine=False)
    server = TritonServer(
        repository, model_control_mode="explicit", log_file=log, env={"INFLIGHT_CACHE": str(tmp_path / "cache")}
    )

    def starts() -> tuple[int, int]:
        """In full, and from kept weights."""
        lines = log.read_text(errors="replace").splitlines()
        in_full, reused = (sum(line.endswith(f": {phase}") for line in lines) for phase in (IN_FULL, REUSED))
        return in_full, reused

    with killed_at_the_end(server):
        load(server, "first")
        expected = answers(server, "first")
        assert starts() == (1, 0)
        wait_for(lambda: list((tmp_path / "cache/weights").glob("*.iw")))
        for number, name in enumerate(("forked", "executed"), 1):
            load(server, name)
            assert starts() == (1, number)
            assert answers(server, name) == expected
        engine_process(server, "first").kill()
        assert answers(server, "first") == expected
        assert starts() == (1, 3)

        def weights(*arguments: str) -> list[str]:
            done = CliRunner().invoke(app, ["weights", *arguments], env={"INFLIGHT_CACHE": str(tmp_path / "cache")})
            assert done.exit_code == 0, done.output
            return done.output.splitlines()

        (verified,) = weights("verify")
        assert verified.startswith("whole ")
        assert answers(server, "first") == expected
        (dropped,) = weights("drop", "--all")
        assert dropped.startswith("dropped ")
        assert answers(server, "first") == expected, "an engine that has mapped the file goes on"
        engine_process(server, "first").kill()
        assert answers(server, "first") == expected
        assert answers(server, "forked") == expected
