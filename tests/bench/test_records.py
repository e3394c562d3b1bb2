"""The records of benchmarks, and parts of them that fail."""

from __future__ import annotations

import json
from argparse import Namespace

import common
import pytest


def test_a_record_has_no_folder_of_the_machine(tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["bench/some.py", "--peer", "/opt/peers/build/bin", "--output", f"{output}"])
    failed = {"part": f"Error: '/usr/bin/python', '{common.ROOT}/bench/some.py' at redis://127.0.0.1:7/0, 3/4 tokens/s"}
    common.record(Namespace(output=output, peer="/opt/peers/build/bin"), {"a / b": [{"x": 1.5}]}, failed=failed)
    written = json.loads(output.read_text())
    assert written["command"] == "python bench/some.py --peer FOLDER/bin --output FOLDER/record.json"
    assert written["arguments"] == {"peer": "FOLDER/bin"}
    assert written["failed"] == {
        "part": "Error: 'FOLDER/python', 'bench/some.py' at redis://127.0.0.1:7/0, 3/4 tokens/s"
    }
    assert written["runs"] == {"a / b": [{"x": 1.5}]}


def test_a_side_that_fails_leaves_the_others_and_what_it_has_measured():
    def run(side: str, number: int) -> common.Run:
        if (side, number) == ("second", 1):
            raise SystemExit("does not start")
        return {"x": number}

    attempts = common.Attempts()
    runs = common.alternate(("first", "second"), 3, run, str, attempts)
    assert runs == {"first": [{"x": 0}, {"x": 1}, {"x": 2}], "second": [{"x": 0}]}
    assert attempts.failed == {"second": "SystemExit: does not start"}
    with pytest.raises(SystemExit, match="failed: second"):
        attempts.end()
    with pytest.raises(KeyboardInterrupt), attempts.at("interrupted"):
        raise KeyboardInterrupt
    with pytest.raises(SystemExit):
        common.alternate(("second",), 2, run, str)
