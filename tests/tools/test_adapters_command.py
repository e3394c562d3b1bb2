"""`inflight adapters` and `inflight serve --lora-modules` without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.config import EngineConfig
from inflight_client.errors import InvalidRequestError, ServerUnreachableError
from inflight_tools import adapters, cli
from inflight_tools.engine_flags import as_settings
from inflight_tools.repository import lora_modules, write_entry

LOADED = {
    "lora_name": "doll",
    "id": "a" * 32,
    "rank": 8,
    "lora_id": 1,
    "replaced": None,
    "seconds": 0.2,
    "instances": 2,
}


class Answering:
    """A client that gives one answer, or raises it."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked: list[tuple[Any, ...]] = []
        self.model = "m"

    def __call__(self, *args: Any, **options: Any) -> Answering:
        return self

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def control(self, *asked: Any) -> str:
        self.asked.append(asked)
        if isinstance(self.found, Exception):
            raise self.found
        return json.dumps(self.found)

    def model_info(self) -> dict[str, Any]:
        return {"adapters": self.found}


def run(monkeypatch: pytest.MonkeyPatch, found: Any, *arguments: str) -> tuple[Any, Answering]:
    client = Answering(found)
    monkeypatch.setattr(adapters, "find_endpoint", lambda url: ("grpc", url))
    monkeypatch.setattr(adapters, "Client", client)
    monkeypatch.setattr(adapters, "key_of", lambda url: "the key")
    monkeypatch.setattr(adapters, "sole_model", lambda url, protocol, key: "the only one")
    return CliRunner().invoke(cli.app, ["adapters", *arguments]), client


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, {"doll": "a" * 32, "sheep": "b" * 32}, "list")
    assert result.output == f"doll  {'a' * 32}\nsheep  {'b' * 32}\n"
    result, _ = run(monkeypatch, {"doll": "a" * 32}, "list", "--json")
    assert json.loads(result.output) == {"doll": "a" * 32}
    assert run(monkeypatch, {}, "list")[0].output == "no adapters\n"
    result, _ = run(monkeypatch, None, "list")
    assert result.exit_code == 1 and "model 'm' serves no adapters; set enable_lora" in result.output


def test_load_and_unload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, client = run(monkeypatch, LOADED, "load", "doll", "/loras/doll", "--reload")
    assert result.exit_code == 0, result.output
    assert result.output == f"loaded doll in 0.2 s: id {'a' * 32}, rank 8, lora_id 1, 2 instances\n"
    (asked,) = client.asked
    parameters = {"lora_name": "doll", "load_inplace": True, "lora_path": "/loras/doll"}
    assert asked == ("load_adapter", "the only one", 300.0, "the key", parameters)
    monkeypatch.chdir(tmp_path)
    _, client = run(monkeypatch, LOADED, "load", "doll", "doll", "--admin-key", "mine", "--model", "m")
    assert client.asked[0][1:4] == ("m", 300.0, "mine") and client.asked[0][4]["lora_path"] == str(tmp_path / "doll")
    _, client = run(monkeypatch, LOADED, "load", "doll")
    assert client.asked[0][4] == {"lora_name": "doll", "load_inplace": False}
    result, client = run(monkeypatch, {"lora_name": "doll"}, "unload", "doll")
    assert result.output == "unloaded doll\n" and client.asked[0][4] == {"lora_name": "doll"}


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequestError("refused"), 1), (ServerUnreachableError("no server"), 2)]
)
def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, status: int) -> None:
    result, _ = run(monkeypatch, error, "unload", "doll")
    assert result.exit_code == status and len(result.output.strip().splitlines()) == 1


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_lora_modules_in_vllms_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    arguments = ["--lora-modules", f"a={one}", json.dumps({"name": "b", "path": str(two)}), "--dtype", "auto", "x"]
    settings = as_settings(arguments, {"--lora-module", "--dtype"})
    assert settings == ["--lora-module", f"a={one}", "--lora-module", f"b={two}", "--dtype", "auto", "x"]
    assert as_settings([f"--lora-modules=a={one}", "model"], {"--lora-module"}) == [
        "--lora-module",
        f"a={one}",
        "model",
    ]
    own = as_settings(["--lora-modules", '{"name": "a", "path": "b=c"}'], {"--lora-module"})
    assert own == ["--lora-module", "a=b=c"], "a folder may contain it"
    monkeypatch.chdir(tmp_path)
    modules = lora_modules([f"a={one}", "b=two"])
    assert modules == {"a": str(one), "b": str(two)}
    entry = write_entry(tmp_path / "repository", "m", EngineConfig(model="m", enable_lora=True), modules)
    assert json.loads((entry / "1" / "multi_lora.json").read_text()) == modules
    entry = write_entry(tmp_path / "repository", "plain", EngineConfig(model="m"))
    assert not (entry / "1" / "multi_lora.json").exists()
