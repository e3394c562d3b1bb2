"""docs/python.md: its programs run, and a user's mypy sees types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"))


def test_all_programs_of_the_page_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert len(PROGRAMS) == 4
    monkeypatch.chdir(ROOT)
    for program in PROGRAMS:
        assert "seed=" in program or "regex" in program, "a random answer can be short"
        exec(compile(program, "docs/python.md", "exec"), {"__name__": "__main__"})
        assert len(capsys.readouterr().out) > 10


USER = """
from inflight import LLM, RequestOutput, SamplingParams
from inflight_client import Client

llm = LLM("x")
outputs: list[RequestOutput] = llm.generate("a", SamplingParams(max_tokens=3))
reveal_type(outputs[0].outputs[0].text)
reveal_type(llm.generate("a"))
reveal_type(Client("x").generate("a"))
reveal_type(Client("x").generate("a").text)
SamplingParams(max_tokens=[3])
llm.generate(5)
"""


@pytest.mark.nightly
def test_a_users_mypy_sees_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "user.py"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout.replace("builtins.str", "str")
    for line, revealed in {
        7: "str",
        8: "list[inflight.in_process.outputs.RequestOutput]",
        9: "inflight_client.results.GenerationResult",
        10: "str",
    }.items():
        assert f'user.py:{line}: note: Revealed type is "{revealed}"' in said, said
    assert 'user.py:11: error: Argument "max_tokens"' in said
    assert "user.py:12: error: Argument 1" in said
    assert done.stdout.count("error:") == 2, done.stdout


def test_every_package_has_the_marker_of_types() -> None:
    for package in ("backend/inflight", "client/inflight_client", "gateway/inflight_gateway", "tools/inflight_tools"):
        assert (ROOT / package / "py.typed").exists()
