"""Real tritonservers for the benchmarks: a repository, requests over one gRPC stream, and CPU time by process."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import psutil

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

MODEL = "bench"
_MARKS = {  # in command lines
    "backend_stub": "stub",
    "shared_engine_daemon": "keeper",
    "echo_engine.py": "engine",
    "inflight.worker": "engine",
}


ECHO = common.HERE / "echo_engine.py"


def write_repository(
    folder: Path,
    options: dict[str, Any],
    instances: int = 1,
    step_ms: float = 0.0,
    device: str = "cpu",
    echo: Path = ECHO,
) -> Path:
    """A repository with the model `bench`.

    Args:
        options: of model.json.
        instances: stubs of the model.
        step_ms: makes the engine process an echo_engine.py with steps that long; 0 for the real engine process.
        device: where the echo_engine.py says that it computes.
        echo: an earlier echo_engine.py, for a server of its commit.
    """
    version = folder / "repository" / MODEL / "1"
    version.mkdir(parents=True)
    if step_ms:
        interpreter = folder / "python"
        command = f'{sys.executable} {echo} --step-ms {step_ms} --device {device} "$@"'
        interpreter.write_text(f"#!/bin/sh\nexec {command}\n")
        interpreter.chmod(0o755)
        own = {"model": str(common.DEMO), "python_executable": str(interpreter), "spare_engine": False}
        options = {**own, "max_num_seqs": 64, **options}
    group = f"instance_group [ {{ kind: KIND_CPU, count: {instances} }} ]"
    (version.parent / "config.pbtxt").write_text(f'backend: "inflight"\n{group}\n')
    (version / "model.json").write_text(json.dumps(options))
    return folder / "repository"


@contextlib.contextmanager
def served(
    options: dict[str, Any], instances: int = 1, step_ms: float = 0.0, device: str = "cpu", echo: Path = ECHO
) -> Iterator[TritonServer]:
    """A server with the repository of `write_repository`, ready."""
    from inflight_tools.launcher import TritonServer

    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(write_repository(Path(folder), options, instances, step_ms, device, echo)) as server,
    ):
        yield server


# Processes


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def kind_of(pid: int) -> str:
    """The role of a process of a server: "server", "stub", "keeper" (of a shared engine), "engine" or "spare"."""
    process = psutil.Process(pid)
    if process.name() == "inflight-spare":
        return "spare"  # a second engine process, which serves nothing yet
    command = "\0".join(process.cmdline())
    return next((kind for mark, kind in _MARKS.items() if mark in command), "server")


def cpu_by_kind(server: TritonServer) -> dict[str, float]:
    """CPU time so far of a server's processes, by kind."""
    from inflight_tools.processes import session_members

    assert server.process is not None
    found: dict[str, float] = {}
    for pid in session_members(server.process.pid):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            kind = kind_of(pid)
            found[kind] = found.get(kind, 0.0) + cpu_seconds(pid)
    return found


def stub_threads(server: TritonServer) -> dict[int, float]:
    """CPU time so far of the stubs' threads, by id.  While streams run, the sender threads use most."""
    from inflight_tools.processes import session_members

    assert server.process is not None
    stubs = [pid for pid in session_members(server.process.pid) if kind_of(pid) == "stub"]
    return {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for pid in stubs
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def wait_for_rest(server: TritonServer) -> None:
    """Wait until the server's processes, the spare engine included, use less than 0.1 s of CPU time in a second."""
    for _ in range(60):
        before = cpu_by_kind(server)
        time.sleep(1.0)
        after = cpu_by_kind(server)
        if "spare" in after and sum(after.values()) - sum(before.values()) < 0.1:
            return
    raise RuntimeError("the server computes without requests, or has no spare engine process")


# Requests


def tensors(inputs: dict[str, Any]) -> list[Any]:
    """The inputs of a request as tritonclient takes them; `sampling` becomes JSON, and None is left out."""
    import numpy as np
    import tritonclient.grpc as triton

    inputs = {"stream": True, **inputs}
    inputs["sampling_parameters"] = json.dumps(inputs.pop("sampling"))
    found = []
    for name, value in inputs.items():
        if value is None:
            continue
        kind = "BYTES" if isinstance(value, str) else "BOOL" if isinstance(value, bool) else "INT64"
        elements = value if isinstance(value, list) else [value.encode() if isinstance(value, str) else value]
        array = np.array(elements, dtype={"BYTES": np.object_, "INT64": np.int64, "BOOL": np.bool_}[kind])
        found.append(triton.InferInput(name, array.shape, kind))
        found[-1].set_data_from_numpy(array)
    return found


@dataclass
class Answer:
    """When the responses to a request came, in `time.perf_counter()` seconds, with their token ids, or without them
    their text."""

    sent: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: bytes = b""


class Streams:
    """Requests on one bidirectional gRPC stream; a context manager."""

    def __init__(self, address: str, model: str = MODEL) -> None:
        import tritonclient.grpc as triton

        self._model = model
        self._client = triton.InferenceServerClient(address)
        self._client.start_stream(self._receive)
        self._answers: list[Answer] = []
        self._ended = threading.Semaphore(0)
        self._failure: Exception | None = None

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, inputs: dict[str, Any]) -> Answer:
        """Send a request; `inputs` are those of `tensors`."""
        given = tensors(inputs)
        answer = Answer(time.perf_counter())
        self._answers.append(answer)
        number = str(len(self._answers) - 1)
        self._client.async_stream_infer(self._model, given, request_id=number, enable_empty_final_response=True)
        return answer

    def wait(self, count: int = 1) -> None:
        """Wait until `count` more requests have ended.  Raises the error of a request that failed."""
        for _ in range(count):
            self._ended.acquire()
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Cancels what is open."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def _receive(self, result: Any, error: Exception | None) -> None:
        if error is not None:
            self._failure = error
            self._ended.release()
            return
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        if response.outputs or not final:
            answer = self._answers[int(response.id)]
            answer.times.append(time.perf_counter())
            token_ids = result.as_numpy("token_ids")
            if token_ids is not None:
                answer.token_ids += token_ids.ravel().tolist()
            elif response.outputs:
                answer.text += b"".join(result.as_numpy("text_output").ravel())
        if final:
            self._ended.release()


# The outputs of a response beside its text, for each number of outputs that benchmarks compare.
OUTPUTS = {
    1: {},
    2: {"return_token_ids": True},
    4: {"return_token_ids": True, "return_finish_reason": True, "return_num_output_tokens": True},
}


def stream_all(address: str, requests: list[dict[str, Any]], outputs: int = 2) -> list[Answer]:
    """Submit requests `{prompt, out}` at once, greedy and ignoring the end of sequence; returns all answers.

    `outputs` is the number of outputs, a key of `OUTPUTS`; with one, all requests must have the same answer.
    """
    with Streams(address) as streams:
        answers = [
            streams.submit(
                {
                    "input_ids": request["prompt"],
                    "sampling": {"temperature": 0, "max_tokens": request["out"], "ignore_eos": True},
                    **OUTPUTS[outputs],
                }
            )
            for request in requests
        ]
        streams.wait(len(requests))
    if outputs == 1:
        assert len({answer.text for answer in answers}) == 1, "equal requests without the same text"
        return answers
    assert [len(answer.token_ids) for answer in answers] == [request["out"] for request in requests]
    return answers
