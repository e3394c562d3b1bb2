"""GGUF files of the hub: which file a name means, and what is said if there is none."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock
from urllib.parse import urlsplit

import gguf_files
import pytest
from checkpoints import make_checkpoint
from huggingface_hub import constants

from inflight import hub
from inflight.config import EngineConfig
from inflight.frontend.lifecycle.checkpoint_id import checkpoint_id
from inflight.gguf.hub_names import HubName, HubNameError, choose, hub_name
from inflight.hub import CheckpointFileError, checkpoint_file, gguf_file, snapshot
from inflight.loading.checkpoint.checkpoint_config import read_config
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.saved.cache_folder import CacheFolder
from inflight.loading.saved.identity import checkpoint_key
from inflight.model_json import read_model_json
from inflight_tools.ports import pick_ports
from inflight_tools.repository import default_name, resolve_model, write_entry

COMMIT = "c" * 40


class Repositories(BaseHTTPRequestHandler):
    """A hub with the files of a folder: `folder/org/repo/name`."""

    folder: ClassVar[Path]
    downloads: ClassVar[list[str]]

    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]))
        else:
            self._send_file("/".join(parts[:2]), "/".join(parts[4:]))

    do_HEAD = do_GET

    def _list(self, repository: str) -> None:
        home = self.folder / repository
        files = [path for path in sorted(home.rglob("*")) if path.is_file()]
        found = [
            {"type": "file", "path": path.relative_to(home).as_posix(), "size": path.stat().st_size, "oid": "0" * 40}
            for path in files
        ]
        self._answer(json.dumps(found).encode(), code="" if files else "RepoNotFound")

    def _send_file(self, repository: str, name: str) -> None:
        path = self.folder / repository / name
        missing = "EntryNotFound" if path.parent.is_dir() else "RepoNotFound"
        content = path.read_bytes() if path.is_file() else b""
        self._answer(content, code="" if path.is_file() else missing)
        if self.command == "GET" and path.is_file():
            self.downloads.append(name)

    def _answer(self, content: bytes, code: str) -> None:
        self.send_response(404 if code else 200)
        if code:
            content = b'{"error": "what the hub says"}'
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "what the hub says")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    file = folder / "model.gguf"
    gguf_files.as_gguf(make_checkpoint("llama", folder / "plain", hidden_size=64), file, "Q8_0")
    return file


@pytest.fixture
def files(tmp_path: Path, model: Path) -> Path:
    """The repository's."""
    home = tmp_path / "hub" / "acme" / "tiny-GGUF"
    (home / "more").mkdir(parents=True)
    shutil.copy(model, home / "tiny-Q8_0.gguf")
    shutil.copy(model, home / "more" / "other.gguf")
    for name in ("tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf", "tiny-F16-00001-of-00002.gguf", "README.md"):
        (home / name).write_text("not read")
    return home


@pytest.fixture
def online(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Repositories]]:
    class Handler(Repositories):
        folder = tmp_path / "hub"
        downloads: ClassVar[list[str]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        use_hub(monkeypatch, server.server_port)
        yield Handler
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    forget()
    yield
    forget()


def forget() -> None:
    """As a new process."""
    hub._unreachable.cache_clear()
    hub._downloaded.clear()


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    forget()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("acme/tiny-GGUF:Q4_K_M", HubName("acme/tiny-GGUF", "Q4_K_M", None)),
        ("acme/tiny.GGUF:UD-Q4_K_XL", HubName("acme/tiny.GGUF", "UD-Q4_K_XL", None)),
        ("acme/tiny-GGUF/tiny-Q8_0.gguf", HubName("acme/tiny-GGUF", None, "tiny-Q8_0.gguf")),
        ("acme/tiny-GGUF/BF16/tiny.gguf", HubName("acme/tiny-GGUF", None, "BF16/tiny.gguf")),
        ("acme/tiny-GGUF", None),
        ("acme/tiny.gguf", None),
        ("tiny:Q4_K_M", None),
        ("acme/tiny:", None),
        ("/acme/tiny/model.gguf", None),
        ("./acme/tiny/model.gguf", None),
        ("../acme/tiny/model.gguf", None),
        ("acme/tiny/../model.gguf", None),
        ("acme/tiny:Q4/model.gguf", None),
        ("acme/tiny:Q4\n", None),
    ],
)
def test_which_sources_are_files_of_the_hub(source: str, expected: HubName | None) -> None:
    assert hub_name(source) == expected


def test_a_path_into_a_folder_of_this_machine_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_name("models/tiny/model.gguf") is None
    with pytest.raises(CheckpointFileError, match="no such file; give the path of a GGUF file, or a hub id"):
        checkpoint_file("models/tiny/model.gguf", "config.json")


@pytest.mark.parametrize(
    ("tag", "names", "expected"),
    [
        ("Q4_K_M", "a-Q4_K_M.gguf a-Q8_0.gguf", "a-Q4_K_M.gguf"),
        ("q4_k_m", "a.Q4_K_M.gguf a.Q4_K_S.gguf", "a.Q4_K_M.gguf"),
        ("Q4_K_M", "a-UD-Q4_K_M.gguf a-Q4_K_M.gguf", "a-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "a-UD-Q4_K_M.gguf a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf"),
        ("Q8_0", "mmproj-Q8_0.gguf b-imatrix-Q8_0.gguf Q8_0.gguf", "Q8_0.gguf"),
        ("Q8_0", "Q8_0/a-Q8_0.gguf", "Q8_0/a-Q8_0.gguf"),
        ("F16", "a-BF16.gguf a-F16.gguf a-F16.bin", "a-F16.gguf"),
        ("F16", "a-F16-00001-of-00002.gguf a-F16-00002-of-00002.gguf a-F16.gguf", "a-F16.gguf"),
    ],
)
def test_a_tag_means_the_file_whose_name_ends_with_it(tag: str, names: str, expected: str) -> None:
    assert choose(names.split(), tag) == expected


@pytest.mark.parametrize(
    ("tag", "names", "why"),
    [
        ("Q5_0", "a-Q8_0.gguf a-Q4_0.gguf", "ends with Q5_0; it has a-Q4_0.gguf, a-Q8_0.gguf"),
        ("K_M", "a-Q4_K_M.gguf", "it has a-Q4_K_M.gguf"),
        ("Q4_0", "README.md model.safetensors", "it has none that is whole"),
        ("Q4_0", " ".join(f"a-{i:02}.gguf" for i in range(40)), "a-23.gguf and 16 more"),
        ("Q4_0", "a-Q4_0.gguf b-Q4_0.gguf", "several files are Q4_0: a-Q4_0.gguf, b-Q4_0.gguf; name the file"),
        ("F16", "a-F16-00001-of-00002.gguf a-F16-00002-of-00002.gguf", "F16 is split into 2 files, which are not"),
        (".*", "a-Q4_0.gguf", "ends with .*"),
    ],
)
def test_a_tag_without_one_file_is_refused_with_those_there_are(tag: str, names: str, why: str) -> None:
    with pytest.raises(HubNameError) as error:
        choose(names.split(), tag)
    assert why in str(error.value)


@pytest.mark.parametrize("name", ["acme/tiny-GGUF:q8_0", "acme/tiny-GGUF/more/other.gguf"])
def test_a_file_of_the_hub_is_served_as_the_same_file_here(
    name: str, online: type[Repositories], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_file(name)
    assert file is not None and file.read_bytes() == model.read_bytes()
    assert (
        checkpoint_file(name, "tokenizer.json").read_bytes()
        == checkpoint_file(str(model), "tokenizer.json").read_bytes()
    )  # type: ignore[union-attr]
    assert len(online.downloads) == 1, "nothing else is downloaded"
    cache = CacheFolder(tmp_path / "weights", 2**30)
    here, there = (
        EngineConfig.from_dict({"model": each, "device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB"})
        for each in (str(model), name)
    )
    assert checkpoint_key(here, cache) == checkpoint_key(there, cache)
    assert load(there).info.vocab_size == load(here).info.vocab_size
    use_hub(monkeypatch, pick_ports(1)[0])  # which does not answer
    assert gguf_file(name) == file
    assert checkpoint_id(name) is not None
    forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert gguf_file(name) == file
    assert snapshot(name) == snapshot(str(file))


def test_a_file_that_has_left_the_cache_is_downloaded_again(online: type[Repositories]) -> None:
    file = gguf_file("acme/tiny-GGUF:Q8_0")
    assert file is not None and gguf_file("acme/tiny-GGUF:Q8_0") == file
    file.unlink()
    found = gguf_file("acme/tiny-GGUF:Q8_0")
    assert found is not None and found.is_file()


def test_a_hub_that_does_not_list_its_files_is_not_needed(
    online: type[Repositories], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate limit, or a token that expired."""
    file = gguf_file("acme/tiny-GGUF:Q8_0")
    refused = CheckpointFileError("no such file, and the hub says: 429 Too Many Requests")
    monkeypatch.setattr(hub, "_names_on_hub", Mock(side_effect=refused))
    assert gguf_file("acme/tiny-GGUF:Q8_0") == file
    with pytest.raises(CheckpointFileError, match="429"):
        gguf_file("acme/tiny-GGUF:Q4_K_M")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("acme/tiny-GGUF:Q5_0", "ends with Q5_0; it has more/other.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"),
        ("acme/tiny-GGUF:F16", "F16 is split into 2 files"),
        ("acme/tiny-GGUF/none.gguf", "no such file, and the hub's repository has more/other.gguf, tiny-Q4_K_M.gguf"),
        ("acme/none:Q8_0", "no such file, and the hub has no such repository, or it is private"),
        ("acme/none/tiny.gguf", "no such directory, and the hub has no such repository, or it is private"),
        ("acme/tiny-GGUF:Q4_K_M", "it is no GGUF file"),
        (
            "acme/tiny-GGUF",
            "has no config.json, only GGUF files; give acme/tiny-GGUF/FILE, which is one of more/other.gguf, tiny-",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_said_by_name(name: str, why: str, online: type[Repositories]) -> None:
    with pytest.raises(LoadError) as error:
        read_config(EngineConfig(model=name))
    assert why in str(error.value) and "\n" not in str(error.value)
    assert not any("00001" in download for download in online.downloads), "no part of a split file"


def test_without_the_hub_its_cache_is_said(
    online: type[Repositories], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_file("acme/tiny-GGUF:Q8_0")
    use_hub(monkeypatch, pick_ports(1)[0])  # which does not answer
    with pytest.raises(
        CheckpointFileError, match=r"cannot be reached .* of this repository the cache has tiny-Q8_0\.gguf$"
    ):
        gguf_file("acme/tiny-GGUF:Q4_K_M")
    with pytest.raises(CheckpointFileError, match=r"acme/new:Q8_0: cannot get it from the hub: .* cannot be reached"):
        gguf_file("acme/new:Q8_0")


def test_the_command_line_takes_them_as_they_are(tmp_path: Path) -> None:
    names = {"acme/tiny-GGUF:Q8_0": "tiny-GGUF-Q8_0", "acme/tiny-GGUF/more/other.gguf": "other"}
    for name, expected in names.items():
        assert resolve_model(name) == name
        assert default_name(name) == expected
        entry = write_entry(tmp_path / "models", expected, EngineConfig(model=name))
        assert read_model_json(entry / "1" / "model.json").model == name
