"""Forks of a spare process that has kept weights mapped: the tokens of a full load, from one copy of the weights."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import greedy_reference, make_checkpoint
from supervisor_rig import wait_for
from worker_rig import COMMAND, ENV, Worker

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest, Answer, Ask, EngineReady, GetStats, StepMessage, encode
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.engine_client.engine_launcher import EngineLauncher
from inflight.frontend.engine_client.engine_process import EngineProcess
from inflight.frontend.engine_client.fork_server_process import ForkServerProcess
from inflight.grammars.spec import GrammarSpec
from inflight.kernels.cpu import library
from inflight.loading.startup import load_or_reuse, wait_until_kept
from inflight.runner.pipeline import make_runner

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

TOKENIZER = Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint" / "tokenizer.json"
PROMPT = list(range(1, 20))
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "cpu_threads": 2}


class Place:
    """A spare process for `options`, and the file that it has mapped."""

    def __init__(self, file: Path, options: dict[str, Any]) -> None:
        self.checkpoint: str = options["model"]
        self.file = file
        self.options = options
        self.spare = ForkServerProcess(encode(EngineConfig.from_dict(options)), COMMAND, ENV, idle=False)

    def engine(self) -> Worker:
        return Worker(self.spare, **self.options)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a checkpoint that is kept."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    options = {"model": make_checkpoint("llama", tmp_path / "checkpoint"), **OPTIONS}
    load_or_reuse(EngineConfig.from_dict(options))
    wait_until_kept()
    return options


@pytest.fixture
def place(options: dict[str, Any], tmp_path: Path) -> Iterator[Place]:
    (file,) = (tmp_path / "cache" / "weights").glob("*.iw")
    place = Place(file, options)
    yield place
    place.spare.stop()


def generated(engine: Worker) -> list[int]:
    assert isinstance(engine.receive(), EngineReady)
    engine.send(AddRequest(1, PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    found: list[int] = []
    while len(found) < 20:
        message = engine.receive()
        assert isinstance(message, StepMessage)
        found += [token for delta in message.deltas for token in delta.token_ids]
    return found


def maps(pid: int, file: Path) -> bool:
    return file.name in Path(f"/proc/{pid}/maps").read_text()


def test_engines_share_the_mapped_weights_of_their_spare_and_compare_nothing_again(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = greedy_reference(place.checkpoint, [PROMPT], [20])[0]
    engines = [place.engine() for _ in range(2)]
    try:
        for engine in engines:
            assert generated(engine) == expected
            assert maps(engine.process.pid, place.file)
        assert maps(place.spare.pid, place.file)
        assert "comparing the logits" not in capfd.readouterr().err
        place.file.unlink()
        forked = time.monotonic()
        again = place.engine()
        engines.append(again)
        assert generated(again) == expected, "a dropped file stays mapped"
        again.send(Ask(1, GetStats()))
        answer = again.receive()
        assert isinstance(answer, Answer)
        assert answer.value["uptime_seconds"] < time.monotonic() - forked, "the time as a spare is no uptime"
        assert not place.file.exists(), "nothing was loaded in full"
    finally:
        for engine in engines:
            engine.close()


def test_a_file_that_is_cut_while_it_is_mapped_ends_the_engine_and_the_next_one_loads_in_full(place: Place) -> None:
    expected = greedy_reference(place.checkpoint, [PROMPT], [20])[0]
    engine = place.engine()
    try:
        assert isinstance(engine.receive(), EngineReady)
        os.truncate(place.file, 4096)
        engine.send(AddRequest(1, PROMPT, SamplingParams(max_tokens=2)))
        assert engine.process.wait(60) == -signal.SIGBUS
    finally:
        engine.close()
    engine = place.engine()
    try:
        assert generated(engine) == expected
        assert not maps(engine.process.pid, place.file) or place.file.stat().st_size > 4096
    finally:
        engine.close()


@pytest.mark.nightly  # tests/backend/loading/test_mapped_writes.py has what tells
def test_a_file_that_is_rewritten_in_place_is_not_taken_from_the_spare(place: Place) -> None:
    """By a tool that sets its times again: the next engine verifies it, and loads in full."""
    expected = greedy_reference(place.checkpoint, [PROMPT], [20])[0]
    before = place.file.stat()
    with place.file.open("r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        file.write(b"\xff" * 4096)
    os.utime(place.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    engine = place.engine()
    try:
        assert generated(engine) == expected
    finally:
        engine.close()


def test_a_draft_model_is_mapped_and_tried_by_the_spare_too(
    options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    draft = make_checkpoint("llama", tmp_path / "draft", intermediate_size=64)
    options["speculative_config"] = {"model": draft, "kv_cache_memory": "8MiB"}
    make_runner(EngineConfig.from_dict(options))
    wait_until_kept()
    capfd.readouterr()
    files = list((tmp_path / "cache" / "weights").glob("*.iw"))
    assert len(files) == 2
    place = Place(files[0], options)
    engine = place.engine()
    try:
        assert generated(engine) == greedy_reference(place.checkpoint, [PROMPT], [20])[0]
        assert all(maps(engine.process.pid, file) for file in files)
        log = capfd.readouterr().err
        assert "comparing the logits" not in log and "importing transformers" not in log
    finally:
        engine.close()
        place.spare.stop()


@pytest.mark.nightly  # imports transformers; test_engine_launcher.py shows what follows
@pytest.mark.parametrize("of_draft", [False, True])
def test_a_spare_that_was_made_before_weights_were_kept_says_that_it_is_outdated(
    options: dict[str, Any], tmp_path: Path, of_draft: bool
) -> None:
    """Of the model, or of the model that drafts for it."""
    folder = tmp_path / "cache" / "weights"
    (file,) = folder.glob("*.iw")
    if of_draft:
        draft = make_checkpoint("llama", tmp_path / "draft", intermediate_size=64)
        options["speculative_config"] = {"model": draft, "kv_cache_memory": "8MiB"}
        make_runner(EngineConfig.from_dict(options))
        wait_until_kept()
        (file,) = {*folder.glob("*.iw")} - {file}
    elsewhere = file.rename(file.with_suffix(".elsewhere"))
    spare = ForkServerProcess(encode(EngineConfig.from_dict(options)), COMMAND, ENV, idle=False)
    try:
        Worker(spare, **{**options, "max_model_len": 4096}).close()  # once its imports are done
        assert spare.is_ready
        assert not spare.is_outdated
        elsewhere.rename(file)
        spare._socket.settimeout(60)
        assert spare._socket.recv(1) == b"o"
    finally:
        spare.stop()


@pytest.mark.nightly  # tests/backend/test_fork_server_heirs.py has the parts
def test_the_vocabulary_of_grammars_is_read_beside_an_engine_and_its_next_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an heir of the spare process, which forks from then on; and by one of the next spare process."""
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint", vocab_size=32000, eos_token_id=2)
    shutil.copy(TOKENIZER, Path(checkpoint) / "tokenizer.json")
    config = EngineConfig.from_dict({"model": checkpoint, **OPTIONS})
    make_runner(config)
    wait_until_kept()
    launcher = EngineLauncher(config, COMMAND, ENV)
    digits = SamplingParams(temperature=0.0, max_tokens=4, grammar=GrammarSpec("regex", "[0-9]{1,6}"))

    def answered() -> EngineProcess:
        engine = launcher.launch()
        assert isinstance(engine, EngineProcess)
        engine.wait_ready(100)
        engine.send(encode(AddRequest(1, PROMPT, digits)))
        while not (isinstance(message := engine.receive(), StepMessage) and message.deltas):
            assert isinstance(message, StepMessage) and not message.failed
        return engine

    def heir(server: int) -> int:
        def found() -> list[psutil.Process]:
            return [child for child in psutil.Process(server).children() if "inflight-spare" in child.name()]

        return int(wait_for(found)[0].pid)

    engines = [answered()]
    try:
        outdated = launcher._fork_server
        assert outdated is not None
        first = heir(outdated.pid)
        while psutil.Process(engines[-1].pid).ppid() != first:  # until it has taken over
            engines.append(answered())
        outdated.is_outdated = True
        wait_for(lambda: launcher.keep_fork_server() is None and launcher._fork_server is not outdated)
        successor = launcher._fork_server
        assert successor is not None
        assert heir(successor.pid)
    finally:
        for engine in engines:
            engine.stop(polite=False)
        launcher.close()
