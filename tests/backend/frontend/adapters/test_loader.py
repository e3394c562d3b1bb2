"""Adapters of a model instance: multi_lora.json, and loads, reloads and unloads while it serves."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_adapter

from inflight.config import ConfigError, EngineConfig
from inflight.engine.messages import LoadAdapter
from inflight.frontend.adapters.loader import AdapterLoader
from inflight.frontend.errors import RequestError
from inflight.frontend.operator.adapter_control import adapter_controls
from inflight.frontend.request.contract import WireRequest


class Rig:
    """A loader, and an engine that has what it is asked to load."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.model_dir = tmp_path / "model" / "1"
        self.model_dir.mkdir(parents=True)
        self.asked: list[Any] = []
        self.error: RequestError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[str] = []
        self.counted: list[str] = []
        self.made: list[AdapterLoader] = []

    def make(self, multi_lora: Any = None, **options: Any) -> AdapterLoader:
        if multi_lora is not None:
            text = multi_lora if isinstance(multi_lora, str) else json.dumps(multi_lora)
            (self.model_dir / "multi_lora.json").write_text(text)
        config = EngineConfig.from_dict({"model": "m", "enable_lora": True, **options})
        loader = AdapterLoader(
            config,
            self.model_dir,
            lambda level, line: self.log.append(line),
            lambda outcome, seconds: self.counted.append(outcome),
            self.folder / "kept",
        )
        self.made.append(loader)
        return loader

    def ask(self, question: Any) -> Future[Any]:
        assert isinstance(question, LoadAdapter)
        self.asked.append(question.ref)
        answer: Future[Any] = Future()
        error = self.error

        def resolve() -> None:
            self.gate.wait(20)
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result({"name": question.ref.name, "id": question.ref.id, "rank": question.ref.rank})

        threading.Thread(target=resolve).start()
        return answer


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.gate.set()
    for loader in rig.made:
        loader.stop()


def control(loader: AdapterLoader, name: str, **parameters: Any) -> dict[str, Any]:
    """The answer to a `control` request."""
    future = adapter_controls(loader)[name](WireRequest({}, {"control": name, "admin_key": "k", **parameters}))
    return dict(json.loads(future.result(20)))


def refused(loader: AdapterLoader, name: str, **parameters: Any) -> str:
    with pytest.raises(RequestError) as caught:
        control(loader, name, **parameters)
    assert caught.value.code == "INVALID_ARG", caught.value
    assert "\n" not in caught.value.message
    return caught.value.message


def started(rig: Rig, *args: Any, **options: Any) -> AdapterLoader:
    loader = rig.make(*args, **options)
    loader.start(rig.ask)
    return loader


# -- multi_lora.json -------------------------------------------------------------------------------


def test_folders_beside_the_file_and_elsewhere(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(rig.model_dir / "loras" / "doll", seed=1)
    write_adapter(tmp_path / "sheep", seed=2)
    write_adapter(tmp_path / "cwd" / "weights" / "bactrian", seed=3)
    monkeypatch.chdir(tmp_path / "cwd")
    names = {"doll": "loras/doll", "sheep": str(tmp_path / "sheep"), "bactrian": "./weights/bactrian"}
    loader = started(rig, names)
    assert list(loader.registry.ids()) == ["doll", "sheep", "bactrian"]
    assert [ref.name for ref in rig.asked] == ["doll", "sheep", "bactrian"]
    assert len(set(loader.registry.ids().values())) == 3
    for number, name in enumerate(names, 1):
        found = loader.registry.chosen(None, number)
        assert found is not None and found.ref.name == name


def test_a_missing_file_is_vllm_backends_error(rig: Rig) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        rig.make()
    assert str(caught.value) == f"Triton backend cannot find {rig.model_dir / 'multi_lora.json'}."
    assert rig.make(lora_allowed_paths=[str(rig.folder)]).registry.ids() == {}


def test_without_lora_the_file_is_not_read(rig: Rig) -> None:
    loader = rig.make("nonsense", enable_lora="false")
    loader.start(rig.ask)
    assert not loader.registry.enabled and not rig.asked and not (rig.folder / "kept").exists()
    assert refused(loader, "load_adapter", lora_name="doll") == "LoRA feature is not enabled."
    assert refused(loader, "unload_adapter", lora_name="doll") == "LoRA feature is not enabled."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object of names and folders"),
        ('{"doll": 5}', "must be an object of names and folders"),
        ('{"doll": ""}', "must be an object of names and folders"),
        ('{"": "x"}', "a name of 0 bytes: 1 to 1024"),
        (json.dumps({"x" * 1025: "x"}), "a name of 1025 bytes: 1 to 1024 are allowed"),
        ('{"\\ud800": "x"}', "unpaired surrogate"),
        ('{"doll,sheep": "x"}', "the name 'doll,sheep' has a comma or a control character; choose another name"),
        ('{"do\\nll": "x"}', r"the name 'do\nll' has a comma or a control character"),
        ('{"doll": "nowhere"}', "adapter 'doll': there is no folder"),
        ('{"doll": "\\u0000"}', "adapter 'doll': there is no folder"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_wrong_file_fails_the_load(rig: Rig, content: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rig.make(content)
    assert said in str(caught.value)


def test_an_adapter_that_does_not_fit_fails_the_load_by_name(rig: Rig) -> None:
    write_adapter(rig.model_dir / "doll", rank=32)
    with pytest.raises(ConfigError, match=r"multi_lora.json: adapter 'doll': .*max_lora_rank=16"):
        rig.make({"doll": "doll"})
    loader = rig.make({"doll": "doll"}, max_lora_rank=32)
    rig.error = RequestError("INVALID_ARG", "adapter 'doll': it has weights for layers.9")
    with pytest.raises(ConfigError, match=r"multi_lora.json: adapter 'doll': it has weights for layers.9"):
        loader.start(rig.ask)


# -- control ---------------------------------------------------------------------------------------


def test_load_reload_and_unload(rig: Rig) -> None:
    source = write_adapter(rig.folder / "loras" / "doll", seed=1)
    loader = started(rig, {}, lora_allowed_paths=[str(rig.folder / "loras")])
    first = control(loader, "load_adapter", lora_name="doll", lora_path=str(source))
    assert (first["lora_name"], first["rank"], first["lora_id"], first["replaced"]) == ("doll", 4, 1, None)
    assert loader.registry.ids() == {"doll": first["id"]}
    said = refused(loader, "load_adapter", lora_name="doll", lora_path=str(source))
    assert said == (
        "The lora adapter 'doll' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True."
    )
    used = loader.registry.chosen("doll", None)
    write_adapter(source, seed=2)
    second = control(loader, "load_adapter", lora_name="doll", lora_path=str(source), load_inplace=True)
    assert (second["lora_id"], second["replaced"]) == (1, first["id"]) and second["id"] != first["id"]
    assert used is not None and Path(used.ref.path).is_dir(), "an open request has it"
    path, used = Path(used.ref.path), None
    assert not path.exists()
    assert control(loader, "unload_adapter", lora_name="doll")["id"] == second["id"]
    assert loader.registry.ids() == {}
    assert refused(loader, "unload_adapter", lora_name="doll") == "The lora adapter 'doll' cannot be found."
    assert rig.counted == ["loaded", "loaded"]


def test_names_of_the_file_can_be_reloaded_without_a_path(rig: Rig) -> None:
    source = write_adapter(rig.model_dir / "doll", seed=1)
    loader = started(rig, {"doll": "doll"})
    before = loader.registry.ids()
    write_adapter(source, seed=2)
    control(loader, "load_adapter", lora_name="doll", load_inplace="true")
    assert loader.registry.ids() != before
    control(loader, "unload_adapter", lora_name="doll")
    control(loader, "load_adapter", lora_name="doll", lora_path=str(source))
    assert "lora_path is missing: 'sheep' is not in multi_lora.json" in refused(
        loader, "load_adapter", lora_name="sheep"
    )


@pytest.mark.parametrize("path", ["outside", "allowed/../outside", "relative", "", "\0", "/proc/self"])
def test_only_the_operators_folders_are_read(rig: Rig, path: str) -> None:
    write_adapter(rig.folder / "outside")
    (rig.folder / "allowed").mkdir()
    loader = started(rig, {}, lora_allowed_paths=[str(rig.folder / "allowed")])
    given = str(rig.folder / path) if path.endswith("outside") else path
    said = refused(loader, "load_adapter", lora_name="doll", lora_path=given)
    assert said.startswith("lora_path=") and not rig.asked
    loader = started(rig, {"doll": str(rig.folder / "outside")})
    said = refused(loader, "load_adapter", lora_name="other", lora_path=str(rig.folder / "outside"))
    assert "must be the absolute path of a folder in one of lora_allowed_paths of model.json (none)" in said


def test_wrong_parameters(rig: Rig) -> None:
    loader = started(rig, {})
    for parameters, said in (
        ({}, "lora_name is missing"),
        ({"lora_name": ""}, "lora_name is missing"),
        ({"lora_name": 5}, "lora_name=5: must be the name of an adapter"),
        ({"lora_name": "x" * 1025}, "a name of 1025 bytes"),
        (
            {"lora_name": "x", "path": "y"},
            "path: this question takes the parameters load_inplace, lora_name, lora_path",
        ),
        ({"lora_name": "x", "load_inplace": "maybe"}, "load_inplace='maybe': must be true or false"),
        ({"lora_name": "x", "lora_path": 5}, "lora_path=5: must be a folder"),
    ):
        assert said in refused(loader, "load_adapter", **parameters)
    assert "lora_path: this question takes the parameters lora_name" in refused(
        loader, "unload_adapter", lora_name="x", lora_path="y"
    )


def test_a_refused_load_changes_nothing(rig: Rig) -> None:
    source = write_adapter(rig.model_dir / "doll")
    loader = started(rig, {"doll": "doll"})
    before = loader.registry.ids()
    rig.error = RequestError("INVALID_ARG", "adapter 'doll': lora_A of q_proj is not finite")
    assert "not finite" in refused(loader, "load_adapter", lora_name="doll", load_inplace=True)
    rig.error = None
    (source / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not PEFT's" in refused(loader, "load_adapter", lora_name="doll", load_inplace=True)
    assert loader.registry.ids() == before
    assert rig.counted == ["refused", "refused"]
    write_adapter(source)
    control(loader, "load_adapter", lora_name="doll", load_inplace=True)


def test_an_engine_that_is_down_is_unavailable(rig: Rig) -> None:
    write_adapter(rig.model_dir / "doll")
    loader = started(rig, {"doll": "doll"})
    rig.error = RequestError("UNAVAILABLE", "the engine process died")
    with pytest.raises(RequestError) as caught:
        control(loader, "load_adapter", lora_name="doll", load_inplace=True)
    assert caught.value.code == "UNAVAILABLE"


def test_loads_come_one_after_another_and_an_unload_waits_for_its_turn(rig: Rig) -> None:
    write_adapter(rig.model_dir / "doll")
    loader = started(rig, {"doll": "doll"})
    rig.gate.clear()
    load: Callable[[], Future[bytes]] = lambda: loader.load("doll", None, True)  # noqa: E731
    futures = [load(), loader.unload("doll"), load()]
    assert not any(future.done() for future in futures)
    rig.gate.set()
    for future in futures:
        future.result(20)
    assert list(loader.registry.ids()) == ["doll"]


def test_of_two_loads_at_once_the_second_is_refused(rig: Rig) -> None:
    source = write_adapter(rig.folder / "loras" / "doll")
    loader = started(rig, {}, lora_allowed_paths=[str(rig.folder / "loras")])
    rig.gate.clear()
    first, second = (loader.load("doll", str(source), False) for _ in range(2))
    rig.gate.set()
    first.result(20)
    with pytest.raises(RequestError, match="has already been loaded"):
        second.result(20)


def test_a_disk_that_takes_no_copies_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("inflight.frontend.adapters.adapter_files.tempfile.mkdtemp", full)
    with pytest.raises(ConfigError, match=r"kept: adapters cannot be copied to it: No space left.*INFLIGHT_CACHE"):
        rig.make({})
