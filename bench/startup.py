#!/usr/bin/env python3
"""How long an engine process takes to be ready: a full load, and one from the weights that an earlier load has kept.

    python bench/startup.py [--models llama-60m-rand qwen3-0.6b-rand FILE.gguf] [--tokenizer full] [--rounds 5]
        [--output FILE]

Each start is an engine process that does its imports itself, as the frontend starts it, up to its message that it is
ready.  The file of kept weights is made by a start that is not timed.  `--tokenizer full` gives the model one of
151,669 tokens, as checkpoints of that size have; those with random weights have 32,000.

    full            INFLIGHT_CACHE=off
    kept            from kept weights
    full, cold      full, with the checkpoint's files not in the page cache
    kept, cold      from kept weights that are not in the page cache, nor is the checkpoint
    killed, spare   from SIGKILL of an engine with kept weights to the next token of a short request: a spare process
                    has them mapped and has run a token
    killed          the same without a spare process
    second          a second engine with a spare process of its own, as another tritonserver has them: until it is
                    ready; and the memory of the first two processes and of all four in MiB, each page counted once,
                    when all that they do while they are idle is done; the part of it that is no file's, which does
                    not depend on what the system has read of the weights, in `anon`
    second, grammars        the same once each engine has had a request with a grammar
    second, no spare        the same as `second` with engines that have no spare process
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import common
import psutil

MOST_SECONDS = 300.0  # for a message of an engine, and for memory to stay as it is
SIDES = (
    "full",
    "kept",
    "full, cold",
    "kept, cold",
    "killed, spare",
    "killed",
    "second",
    "second, grammars",
    "second, no spare",
)


def start(options: dict[str, Any], keep: str) -> float:
    """Seconds until an engine process is ready."""
    from inflight.config import EngineConfig
    from inflight.frontend.engine_client.engine_launcher import EngineLauncher
    from inflight.frontend.engine_client.engine_process import EngineProcess, engine_command

    config = EngineConfig.from_dict(options)
    env = {"INFLIGHT_CACHE": keep}
    begun = time.perf_counter()
    engine = EngineLauncher(config, engine_command(config), env).launch()
    assert isinstance(engine, EngineProcess)
    engine.wait_ready(600)
    seconds = time.perf_counter() - begun
    kept = Path(keep) / "weights"
    while keep != "off" and not list(kept.glob("*.iw")):  # written once the engine is ready
        time.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    engine.stop(polite=False)
    return seconds


def killed(options: dict[str, Any], keep: str) -> common.Run:
    """Seconds from SIGKILL to the next token, and the memory of the engine and its spare process in MiB."""
    from inflight.config import EngineConfig
    from inflight.engine.messages import AddRequest, encode
    from inflight.engine.sampling_params import SamplingParams
    from inflight.frontend.engine_client.engine_launcher import EngineLauncher
    from inflight.frontend.engine_client.engine_process import EngineProcess, engine_command

    config = EngineConfig.from_dict(options)
    request = AddRequest(1, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    launcher = EngineLauncher(config, engine_command(config), {"INFLIGHT_CACHE": keep})

    def started() -> EngineProcess:
        engine = launcher.launch()
        assert isinstance(engine, EngineProcess)
        engine.wait_ready(600)
        engine.send(encode(request))
        until_a_token(engine)
        return engine

    engine = started()
    spare = launcher._fork_server
    memory = [pss(process.pid) for process in (engine, spare) if process is not None]
    begun = time.perf_counter()
    os.kill(engine.pid, signal.SIGKILL)
    engine.exit_text()
    engine.close()
    engine = started()
    seconds = time.perf_counter() - begun
    engine.stop(polite=False)
    launcher.close()
    return {"seconds": seconds, "pss": sum(memory)}


def second(options: dict[str, Any], keep: str, grammars: bool) -> common.Run:
    """Seconds until the second of two engines is ready, and the memory of one and of both, with their spare ones."""
    from inflight.config import EngineConfig
    from inflight.frontend.engine_client.engine_launcher import EngineLauncher
    from inflight.frontend.engine_client.engine_process import EngineProcess, engine_command

    config = EngineConfig.from_dict(options)
    launchers = [EngineLauncher(config, engine_command(config), {"INFLIGHT_CACHE": keep}) for _ in range(2)]
    engines: list[EngineProcess] = []
    figures: common.Run = {}
    for launcher, name in zip(launchers, ("pss_of_one", "pss_of_two")):
        begun = time.perf_counter()
        engine = launcher.launch()
        assert isinstance(engine, EngineProcess)
        engine.wait_ready(600)
        figures["seconds"] = time.perf_counter() - begun
        engines.append(engine)
        if grammars:
            ask_for_digits(engine)
        spares = [one._fork_server for one in launchers if one._fork_server is not None]
        pids = [process.pid for process in (*engines, *spares)]
        figures[name] = settled(pids, 12.0 if grammars else 4.0)
        figures[f"anon{name[3:]}"] = total(pids, "Pss_Anon")
    for engine, launcher in zip(engines, launchers):
        engine.stop(polite=False)
        launcher.close()
    # A system that lacks memory takes pages of files back, which count all the same.
    files = max(figures[f"pss_of_{count}"] - figures[f"anon_of_{count}"] for count in ("one", "two"))
    return {**figures, "copies": (figures["anon_of_two"] + files) / (figures["anon_of_one"] + files)}


def ask_for_digits(engine: Any) -> None:
    """A request with a grammar, to its end."""
    from inflight.engine.messages import AddRequest, StepMessage, encode
    from inflight.engine.sampling_params import SamplingParams
    from inflight.grammars.spec import GrammarSpec

    digits = GrammarSpec("regex", "[0-9]{1,6}")
    engine.send(encode(AddRequest(1, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4, grammar=digits))))
    while True:
        message = next_message(engine)
        if isinstance(message, StepMessage) and any(delta.finish_reason for delta in message.deltas):
            return


def until_a_token(engine: Any) -> None:
    """Receive up to a message with a token: a request's first one comes in a delta, those behind it in columns."""
    from inflight.engine.messages import StepMessage

    while True:
        message = next_message(engine)
        if isinstance(message, StepMessage) and message.num_tokens:
            return


def next_message(engine: Any) -> Any:
    """Raises RuntimeError if a request fails, or if there is none within `MOST_SECONDS`."""
    from inflight.engine.deltas import RequestFailed
    from inflight.engine.messages import StepMessage

    if not engine._connection.poll(MOST_SECONDS):
        raise RuntimeError(f"the engine has sent nothing for {MOST_SECONDS:g} s")
    message = engine.receive()
    failed = [message] if isinstance(message, RequestFailed) else []
    if isinstance(message, StepMessage):
        failed += message.failed
    if failed:
        raise RuntimeError(f"a request failed: {failed[0].message}")
    return message


def settled(pids: list[int], seconds: float) -> float:
    """The memory of these processes and of their forks in MiB, once their own has not changed by 1 MiB for so long.

    An engine reads the vocabulary of grammars after a second, and a spare process looks every ten seconds whether a
    fork of it is to, on idle cores only: meanwhile no thread of them wants a core.  Pages of files do not count for
    that: other programs map the same libraries.

    Raises:
        RuntimeError: it changes for longer than `MOST_SECONDS`.
    """
    begun = since = time.monotonic()
    found = total(pids, "Pss_Anon")
    while time.monotonic() - since < seconds:
        if time.monotonic() - begun > MOST_SECONDS:
            raise RuntimeError(f"the memory of processes {pids} still changes after {MOST_SECONDS:g} s")
        time.sleep(0.25)
        now = total(pids, "Pss_Anon")
        if abs(now - found) > 1.0 or any(want_a_core(pid) for pid in with_forks(pids)):
            found, since = now, time.monotonic()
    return total(pids, "Pss")


def total(pids: list[int], kind: str) -> float:
    """The memory of these processes and of all that they have forked, each counted once, in MiB."""
    return sum(pss(pid, kind) for pid in with_forks(pids))


def with_forks(pids: list[int]) -> set[int]:
    return {*pids, *(child for pid in pids for child in forks(pid))}


def want_a_core(pid: int) -> bool:
    """Whether a thread of this process runs, or would, if a core were free."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if path.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def forks(pid: int) -> list[int]:
    """The processes below this one: an heir of a spare process, and engines that it has forked."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def pss(pid: int, kind: str = "Pss") -> float:
    """A process's share of the memory, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


def forget(*folders: Path) -> None:
    """Drop the files of these folders, or these files, from the page cache."""
    for path in (path for folder in folders for path in (folder, *folder.rglob("*")) if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(model: str, side: str, cache: str, args: Any) -> common.Run:
    path = model if model.endswith(".gguf") else common.checkpoint(model, args.dtype)
    if side.endswith("cold"):
        forget(Path(path), Path(cache))
    options = {
        "model": path,
        "dtype": args.dtype,
        "device": "cpu",
        "cpu_threads": args.threads,
        "kv_cache_memory": "1GiB",
        "max_model_len": 2048,
        "tokenizer": common.full_tokenizer() if args.tokenizer == "full" else None,
        "spare_engine": side in ("killed, spare", "second", "second, grammars"),
    }
    if side.startswith("second"):
        return second(options, cache, grammars=side == "second, grammars")
    if side.startswith("killed"):
        return killed(options, cache)
    return {"seconds": start(options, "off" if side.startswith("full") else cache)}


def memory_of(runs: list[common.Run]) -> list[str]:
    """The median memory of one engine and of two, if it was measured."""
    if "copies" not in runs[0]:
        return []
    one, two, copies = (median(run[name] for run in runs) for name in ("pss_of_one", "pss_of_two", "copies"))
    return [f"{one:8,.0f} -> {two:,.0f} MiB, {copies:.3f} copies"]


def main() -> None:
    args = common.options(
        __doc__,
        models=["llama-60m-rand", "qwen3-0.6b-rand"],
        sides=common.choice(SIDES),
        dtype=common.choice(["bfloat16", "float32"], "bfloat16"),
        tokenizer=common.choice(["own", "full"], "own"),
        rounds=5,
        threads=1,
    )
    runs: dict[str, dict[str, list[common.Run]]] = {}
    for model in args.models:
        cache = tempfile.mkdtemp(prefix="inflight-startup-")
        try:
            run(model, "kept", cache, args)
            runs[model] = common.alternate(
                args.sides,
                args.rounds,
                lambda side, _, model=model, cache=cache: run(model, side, cache, args),  # type: ignore[misc]
                lambda figures: "  ".join(f"{name} {value:.2f}" for name, value in figures.items()),
            )
        finally:
            shutil.rmtree(cache)
    found = {model: common.medians(sides, "seconds") for model, sides in runs.items()}
    for model, sides in found.items():
        for side, figures in sides.items():
            print(f"{Path(model).name:<18} {side:<16} {figures['seconds']:6.2f} s", *memory_of(runs[model][side]))
    common.record(args, runs, medians=found)


if __name__ == "__main__":
    main()
