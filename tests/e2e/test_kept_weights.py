"""Engines of a real tritonserver start from the weights that the first one has kept, and answer as it does."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from model_entries import killed_at_the_end, load, write_entry
from processes_of import engine_process, engine_processes, model_processes
from small_disk import small_disk
from typer.testing import CliRunner
from wire import post, wait_for

from inflight.config import EngineConfig
from inflight.loading.startup import REUSED, load_or_reuse, wait_until_kept
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


@pytest.mark.nightly
def test_a_disk_that_fills_up_while_engines_serve_loses_no_answer(triton_installed: None, tmp_path: Path) -> None:
    """Kept weights are still used, others cannot be kept any more, and the log says so."""
    repository, log = tmp_path / "models", tmp_path / "log"
    repository.mkdir()
    write_entry(repository, "first")
    write_entry(repository, "second", dtype="bfloat16", spare_engine=False)
    with small_disk(tmp_path / "disk", 64) as disk:
        env = {"INFLIGHT_CACHE": str(disk)}
        with killed_at_the_end(
            TritonServer(repository, model_control_mode="explicit", log_file=log, env=env)
        ) as server:
            load(server, "first")
            expected = answers(server, "first")
            (kept,) = wait_for(lambda: list((disk / "weights").glob("*.iw")))
            with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
            load(server, "second")
            in_bfloat16 = answers(server, "second")
            wait_for(lambda: "the weights are not kept for the next start" in log.read_text(errors="replace"))
            for _ in range(2):
                for name in ("first", "second"):
                    engine_process(server, name).kill()
                assert answers(server, "first") == expected
                assert answers(server, "second") == in_bfloat16
            assert [path.name for path in (disk / "weights").glob("*.[ip]*")] == [kept.name]
            lines = log.read_text(errors="replace").splitlines()
            in_full, reused = (sum(line.endswith(f": {phase}") for line in lines) for phase in (IN_FULL, REUSED))
            assert in_full == 4 and reused >= 2


def memory_of(process: psutil.Process, file: str) -> tuple[float, float]:
    """MiB of a process: its share of the pages of the mapped file, and of memory that is no file's."""
    own = Path(f"/proc/{process.pid}")
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", (own / "smaps").read_text(), flags=re.MULTILINE)
    mapped = sum(int(re.findall(r"^Pss: +(\d+)", part, re.MULTILINE)[0]) for part in parts if file in part)
    (anonymous,) = re.findall(r"^Pss_Anon: +(\d+)", (own / "smaps_rollup").read_text(), re.MULTILINE)
    return mapped / 1024, int(anonymous) / 1024


@pytest.mark.nightly
def test_two_servers_with_three_models_of_one_checkpoint_have_one_copy_of_its_weights(
    triton_installed: None, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"model": str(smollm2), "kv_cache_memory": "128MiB", "max_model_len": 1024}
    load_or_reuse(EngineConfig.from_dict({"device": "cpu", "dtype": "float32", **options}))
    wait_until_kept()
    (file,) = (tmp_path / "cache" / "weights").glob("*.iw")
    size = file.stat().st_size / 2**20
    with contextlib.ExitStack() as stack:
        servers = []
        for number, names in enumerate((["one"], ["two", "three"])):
            repository = tmp_path / f"models{number}"
            for name in names:
                write_entry(repository, name, **options, max_num_seqs=8 + len(name))
            env = {"INFLIGHT_CACHE": str(tmp_path / "cache")}
            servers.append(stack.enter_context(killed_at_the_end(TritonServer(repository, env=env))))
        assert (
            len(
                {
                    json.dumps(answers(server, name))
                    for server, name in zip([servers[0], *[servers[1]] * 2], ("one", "two", "three"))
                }
            )
            == 1
        )
        engines = [process for server in servers for process in engine_processes(server)]
        assert len(engines) == 3
        everything = [process for server in servers for process in model_processes(server)]
        found = {process: memory_of(process, file.name) for process in everything}
        mapped = sum(mapped for mapped, _ in found.values())
        own = [round(found[engine][1]) for engine in engines]
        print(f"{size:.0f} MiB of weights; all processes have {mapped:.0f} of them, and the engines {own} of their own")
        assert 0.9 * size < mapped <= 1.15 * size
        assert max(own) < 0.6 * size, "an engine has a copy"
