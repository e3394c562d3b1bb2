"""Which `model.json` may name code: that of the operator's repository, not one that came with a load request."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inflight.config import ConfigError, EngineConfig
from inflight.frontend.lifecycle.model_json_trust import check_model_json_trust, repositories

CODE: list[dict[str, Any]] = [
    {"python_executable": "python3"},
    {"trust_remote_code": True},
    {"download_dir": "/anywhere"},
    {"otlp_traces_endpoint": "http://anywhere"},
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repository" / "mine" / "3").mkdir(parents=True)
    return tmp_path / "repository"


def check(model_dir: Path, roots: list[Path], keys: dict[str, Any], name: str = "mine", trust: str = "") -> None:
    config = EngineConfig(model="a/b", **keys)
    check_model_json_trust(config, model_dir.resolve(), name, {"INFLIGHT_TRUST_MODEL_JSON": trust}, roots)


@pytest.mark.parametrize("keys", CODE)
def test_the_operators_repository_may_name_code(repository: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    check(repository / "mine" / "3", [tmp_path, repository], keys)
    (tmp_path / "link").symlink_to(repository)
    check(repository / "mine" / "3", [tmp_path / "link"], keys)


def test_an_entry_that_is_a_link_is_the_operators(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "entry" / "1").mkdir(parents=True)
    (repository / "linked").symlink_to(tmp_path / "entry")
    check(tmp_path / "entry" / "1", [repository], CODE[0], name="linked")


@pytest.mark.parametrize("keys", CODE)
def test_a_folder_that_triton_made_may_not(repository: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    made = tmp_path / "folderXYZ" / "3"
    made.mkdir(parents=True)
    # The last is a repository in the folder where Triton makes its own: its entries are there, the model's name is not.
    for roots in ([], [repository], [repository, tmp_path]):
        with pytest.raises(ConfigError, match=f"{next(iter(keys))} may not come from a load request"):
            check(made, roots, keys)
    check(made, [repository], {"max_num_seqs": 4, "chat_template": "x", "tokenizer": "c/d"})


def test_the_folder_of_another_model_may_not(repository: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of 'other' in the server's model repository \(/"):
        check(repository / "mine" / "3", [repository], CODE[0], name="other")


def test_only_the_variable_trusts_every_folder(tmp_path: Path) -> None:
    check(tmp_path, [], CODE[0], trust="1")
    for value in ("", "0", "no"):
        with pytest.raises(ConfigError, match="no repository on the server's command line"):
            check(tmp_path, [], CODE[0], trust=value)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--model-repository=/a", "--model-repository", "b"], ["/a", "b"]),
        (["--model-repo=/a", "--model-store=/c"], ["/a", "/c"]),  # getopt takes a prefix
        (["--model-control-mode=explicit", "--model", "/a", "--load-model=x"], []),
        (["--model-repository"], [""]),
        ([], []),
    ],
)
def test_repositories_are_read_from_the_servers_command_line(
    tmp_path: Path, arguments: list[str], found: list[str]
) -> None:
    command = [sys.executable, "-c", "input()", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as server:
        while Path(f"/proc/{server.pid}/cmdline").read_bytes().count(b"\0") != len(command):
            time.sleep(0.01)  # it has not become Python yet
        assert repositories(server.pid) == [(tmp_path / value).resolve() for value in found]
        server.communicate(b"\n")
    assert repositories(server.pid) == []
