from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import echo
from frontend_rig import FAKE_ENGINE, RecordingClient
from supervisor_rig import PROMPT, TOKENIZER, SupervisorRig, alive, tokens, wait_for

from inflight.config import EngineConfig
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.engine_client.engine_process import EngineStartError, engine_command
from inflight.frontend.engine_client.restart_policy import RestartHistory, RestartPolicy
from inflight.frontend.engine_client.supervisor import Supervisor
from inflight.frontend.errors import RequestError
from inflight.frontend.operator.control import relay
from inflight.frontend.operator.metrics import NoMetrics


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SupervisorRig]:
    rig = SupervisorRig(tmp_path / "control.json").start()
    yield rig
    rig.stop()


def test_requests_get_their_tokens(rig: SupervisorRig) -> None:
    assert rig.ready.attention_backend == "fake"
    clients = [rig.open(stream=k % 2 == 0, max_tokens=k + 1) for k in range(30)]
    for k, client in enumerate(clients):
        assert tokens(client.wait()) == echo(PROMPT, k + 1)
    assert rig.supervisor._send_buffer.in_engine == set()


def test_stop_leaves_no_process(tmp_path: Path) -> None:
    rig = SupervisorRig(tmp_path / "control.json").start()
    pid = rig.supervisor.pid
    assert pid is not None
    client = rig.open(orders="delay=0.01", max_tokens=500)
    assert client.arrived.wait(10)
    rig.stop()
    assert not alive(pid)
    assert client.error == ("UNAVAILABLE", "over")
    rig.supervisor.stop()  # again


def test_a_refusal_by_the_engine_reaches_the_client(rig: SupervisorRig) -> None:
    assert rig.open(orders="refuse=UNAVAILABLE").wait().error == ("UNAVAILABLE", "refused with UNAVAILABLE")
    assert rig.supervisor._send_buffer.in_engine == set()


def test_cancelling_frees_the_engine(rig: SupervisorRig) -> None:
    client = rig.open(orders="delay=0.01", max_tokens=2000)
    assert client.arrived.wait(10)
    client.cancelled = True
    client.wait()
    wait_for(lambda: rig.stats.steps and rig.stats.steps[-1].running == 0)


def test_a_request_that_the_engine_fails_ends_with_the_error(rig: SupervisorRig) -> None:
    bystander = rig.open(orders="delay=0.002", max_tokens=50)
    client = rig.open(orders="giveup=3", max_tokens=100).wait()
    assert client.error == ("UNAVAILABLE", "waited too long")
    assert tokens(client) == echo(PROMPT, 3)
    assert tokens(bystander.wait()) == echo(PROMPT, 50)
    assert rig.supervisor._send_buffer.in_engine == set()


@pytest.mark.parametrize("run", [2, 3, 7])
def test_several_tokens_a_step_arrive_like_single_ones(rig: SupervisorRig, run: int) -> None:
    whole = rig.open(max_tokens=40, stop=["namesthe l"]).wait()
    runs = rig.open(orders=f"run={run}", max_tokens=40, stop=["namesthe l"]).wait()
    assert (runs.texts(), tokens(runs)) == (whole.texts(), tokens(whole))
    assert len(tokens(runs)) < 40


def test_a_request_that_begins_with_output_gets_the_rest(rig: SupervisorRig) -> None:
    whole = rig.open(max_tokens=20).wait()
    rest = rig.open(max_tokens=20, fields={"output_token_ids": [echo(PROMPT, 7)]}).wait()
    assert tokens(rest) == tokens(whole)[7:]
    assert TOKENIZER.decode(PROMPT + tokens(whole)[:7]) + rest.texts()[0] == TOKENIZER.decode(PROMPT + tokens(whole))


def test_a_stop_string_aborts_only_the_sequence_it_ends(rig: SupervisorRig) -> None:
    client = rig.open(orders="delay=0.005", n=2, max_tokens=40, stop=["list of n"]).wait()
    assert [text.rstrip() for text in client.texts()] == ["the", "the"]
    wait_for(lambda: rig.stats.steps[-1].running == 0)


def test_the_number_of_sequences_that_wait_for_a_restart_is_limited(tmp_path: Path) -> None:
    rig = SupervisorRig(tmp_path / "control.json", max_queue_size=3).start()
    try:
        rig.order(start="hang")
        pid = rig.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: rig.supervisor.pid is None)
        waiting = [rig.open(max_tokens=2, n=2), rig.open(max_tokens=2)]
        error = rig.open().wait().error
        assert error is not None
        assert error[0] == "UNAVAILABLE"
        assert "3 sequences wait for it (max_queue_size=3)" in error[1]
        waiting[0].cancelled = True  # leaves its place
        assert waiting[0].wait().error == ("CANCELLED", "Request was cancelled")
        wait_for(lambda: rig.supervisor._send_buffer.num_new == 1)
        more = rig.open(max_tokens=2, n=2)
        rig.control.unlink()
        hanging = wait_for(lambda: rig.supervisor._engine_process)
        os.kill(hanging.pid, signal.SIGKILL)
        assert tokens(waiting[1].wait()) == echo(PROMPT, 2)
        assert more.wait().error is None
    finally:
        rig.stop()


def test_engines_that_others_kill_are_no_failed_restarts(rig: SupervisorRig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.open(orders="pause=5", max_tokens=6)
    wait_for(lambda: client.responses)
    launch, lost = rig.supervisor._launcher.launch, [True] * 2 * RestartPolicy().refuse_after

    def next_launch() -> Any:
        if not lost:
            return launch()
        lost.pop()
        raise EngineStartError("the engine process died", lost=True)

    monkeypatch.setattr(rig.supervisor._launcher, "launch", next_launch)
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert tokens(client.wait()) == echo(PROMPT, 6) and not lost


def test_after_several_failed_restarts_requests_are_refused_until_one_succeeds(rig: SupervisorRig) -> None:
    rig.order(start="exit")
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.supervisor.pid is None)
    error = rig.open().wait().error
    assert error is not None
    assert error[0] == "UNAVAILABLE"
    assert "cannot be restarted (" in error[1]
    assert "exited while loading the model (exit status 7)" in error[1]
    rig.control.unlink()
    wait_for(lambda: rig.supervisor.pid)
    assert tokens(rig.open(max_tokens=2).wait()) == echo(PROMPT, 2)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("fatal", "told to fatal"),
        ("fail", "told to fail"),
        ("exit", "the engine process exited while loading the model (exit status 7)"),
        ("hang", "the engine process was not ready after 1 s: raise engine_start_timeout in model.json"),
    ],
)
def test_a_failed_first_start_raises_and_leaves_nothing_running(tmp_path: Path, order: str, says: str) -> None:
    rig = SupervisorRig(tmp_path / "control.json", engine_start_timeout=1.0 if order == "hang" else 60.0)
    rig.order(start=order)
    with pytest.raises(EngineStartError) as caught:
        rig.supervisor.start()
    assert str(caught.value) == says
    assert rig.supervisor._engine_process is None
    assert not [thread for thread in rig.supervisor._threads if thread.is_alive()]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"python_executable": "/nonexistent/python"}, "'/nonexistent/python' not found; fix python_executable"),
        ({"python_executable": "a\0b"}, "cannot start the engine process"),
        ({"seed": 10**40}, "cannot start the engine process: OverflowError"),
        ({"engine_start_timeout": 1e300}, "cannot start the engine process: OverflowError"),
    ],
)
def test_a_program_that_cannot_be_started_raises_at_once(config: dict[str, Any], says: str) -> None:
    supervisor = Supervisor(EngineConfig(model="m", **config), lambda level, line: None)
    with pytest.raises(EngineStartError, match=says):
        supervisor.start()
    assert supervisor._engine_process is None


def test_stop_while_the_engine_is_loading(tmp_path: Path) -> None:
    rig = SupervisorRig(tmp_path / "control.json")
    rig.order(start="hang")
    failed: list[BaseException] = []

    def start() -> None:
        try:
            rig.supervisor.start()
        except EngineStartError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    process = wait_for(lambda: rig.supervisor._engine_process)
    rig.supervisor.stop()
    thread.join(10)
    assert failed
    assert not alive(process.pid)


def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """Even one that is loading and reads no pipe."""
    import subprocess

    control = tmp_path / "control.json"
    control.write_text('{"start": "hang"}')
    program = (
        "import sys, threading, time\n"
        "from inflight.config import EngineConfig\n"
        "from inflight.frontend.engine_client.supervisor import Supervisor\n"
        f"s = Supervisor(EngineConfig(model='m'), print, command={FAKE_ENGINE!r},"
        f" env={{'FAKE_ENGINE_CONTROL': {str(control)!r}}})\n"
        "threading.Thread(target=s.start, daemon=True).start()\n"
        "while s._engine_process is None: time.sleep(0.01)\n"
        "print(s._engine_process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: psutil.Process(pid).cmdline()[: len(FAKE_ENGINE)] == FAKE_ENGINE)  # it has called prctl before
    assert alive(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(pid))


def test_the_first_restart_comes_at_once_and_delays_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_delay=0.1, longest_delay=1.0)
    assert [policy.delay(k) for k in (0, 1, 2, 3, 4, 5, 6, 500)] == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_only_idle_deaths_delay_the_next_start() -> None:
    restarts = RestartHistory(RestartPolicy(first_delay=0.1, refuse_after=3, give_up_after=4))
    for _ in range(3):
        restarts.died(had_requests=True, had_tokens=False, lived=0.1)
        assert (restarts.delay, restarts.refusal("why")) == (0, None)
    restarts.died(had_requests=True, had_tokens=True, lived=0.1)  # a request got further
    for _ in range(4):
        assert (restarts.delay, restarts.refusal("why")) == (0, None)
        restarts.died(had_requests=True, had_tokens=False, lived=0.1)
    assert restarts.refusal("why") == "the engine process died 4 times in a row without a token: why"
    for _ in range(2):
        restarts.died(had_requests=True, had_tokens=False, lived=0.1)
    assert restarts.delay == 0.1


def test_idle_deaths_in_a_row_refuse_requests_until_one_process_lives() -> None:
    restarts = RestartHistory(RestartPolicy(first_delay=0.1, refuse_after=3, healthy_seconds=60))
    found = []
    for lived in (1, 1, 1, 90, 1):
        restarts.died(had_requests=False, had_tokens=False, lived=lived)
        found.append((restarts.delay, restarts.refusal("why")))
    refusal = "the engine process died 3 times in a row while it was idle: why"
    assert found == [(0, None), (0.1, None), (0.2, refusal), (0, None), (0.1, None)]


def test_the_real_engine_is_a_module_of_the_package_in_a_folder_of_any_name(tmp_path: Path) -> None:
    *start, program, module, folder = engine_command(EngineConfig(model="m", python_executable="p"))
    assert (start, module) == (["p", "-c"], "inflight.worker")
    assert Path(folder, "worker.py").is_file()
    copy = tmp_path / "vllm"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    command = [sys.executable, "-I", "-c", program, module, str(copy), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "--fd" in done.stdout) == (0, True), done.stderr


# -- questions ---------------------------------------------------------------------------------


def open_questions(rig: SupervisorRig) -> dict[int, Future[Any]]:
    return rig.supervisor._questions._open


def failure(future: Future[Any]) -> tuple[str, str]:
    error = future.exception(timeout=20)
    assert isinstance(error, RequestError)
    return error.code, error.message


def test_each_question_is_answered_while_requests_run(rig: SupervisorRig) -> None:
    client = rig.open(orders="delay=0.002", max_tokens=50)
    asked = [rig.ask() for _ in range(20)]
    assert [future.result(timeout=20) for future in asked] == [f"answer {k}".encode() for k in range(1, 21)]
    assert tokens(client.wait()) == echo(PROMPT, 50)
    assert not open_questions(rig)


def test_a_question_that_the_engine_refuses_fails_with_its_words(rig: SupervisorRig) -> None:
    rig.order(answer="error")
    assert failure(rig.ask()) == ("INVALID_ARG", "told to refuse")
    assert not open_questions(rig)


def test_a_withdrawn_question_is_forgotten_and_its_late_answer_is_ignored(rig: SupervisorRig) -> None:
    rig.order(answer="never")
    future = rig.ask()
    with pytest.raises(futures.TimeoutError):  # the built-in one from Python 3.11 on
        future.result(timeout=0.05)
    assert future.cancel()
    assert not open_questions(rig)
    with pytest.raises(CancelledError):
        future.result()
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # the next question is cancelled while it is on its way
    try:
        late = rig.ask()
        wait_for(lambda: not rig.supervisor._questions.num_queued)
        assert late.cancel()
        rig.control.unlink()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert rig.ask().result(timeout=20) == b"answer 3"
    assert not open_questions(rig)


def test_questions_fail_with_the_engine_that_was_sent_them(rig: SupervisorRig) -> None:
    rig.order(answer="never")
    silent = rig.ask()
    wait_for(lambda: not rig.supervisor._questions.num_queued)
    rig.order(answer="crash")
    reason = "the engine process died (signal 9, SIGKILL); it is being restarted"
    assert failure(rig.ask()) == ("UNAVAILABLE", reason)
    assert failure(silent) == ("UNAVAILABLE", reason)
    rig.control.unlink()
    assert rig.ask().result(timeout=20).startswith(b"answer"), "the next engine answers"
    assert not open_questions(rig)


def test_questions_wait_for_a_restart_and_fail_if_there_is_none(rig: SupervisorRig) -> None:
    rig.order(start="hang")
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.supervisor.pid is None)
    waiting = rig.ask()
    withdrawn = rig.ask()
    assert withdrawn.cancel()
    assert list(open_questions(rig).values()) == [waiting]
    rig.order(start="exit")
    with contextlib.suppress(ProcessLookupError):  # unless it read the order
        os.kill(wait_for(lambda: rig.supervisor._engine_process).pid, signal.SIGKILL)
    code, message = failure(waiting)
    assert (code, "the engine process cannot be restarted (2 attempts failed)" in message) == ("UNAVAILABLE", True)
    assert failure(rig.ask()) == (code, message), "refused at once from now on"
    rig.control.unlink()
    wait_for(lambda: rig.supervisor.pid)
    assert rig.ask().result(timeout=20).startswith(b"answer")


def test_stop_fails_open_questions_and_refuses_new_ones(tmp_path: Path) -> None:
    rig = SupervisorRig(tmp_path / "control.json").start()
    rig.order(answer="never")
    future = rig.ask()
    rig.stop()
    unloaded = ("UNAVAILABLE", "the model is being unloaded")
    assert failure(future) == unloaded
    assert failure(rig.ask()) == unloaded
    assert not open_questions(rig)


@pytest.fixture
def triton_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`TritonPythonModel` without Triton."""
    names = ("inflight.model", "inflight.frontend.triton")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("pb_utils"))
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module("inflight.model").TritonPythonModel()
    for name in names:
        sys.modules.pop(name, None)


def test_an_unload_answers_open_requests_and_questions(tmp_path: Path, triton_model: Any) -> None:
    rig = SupervisorRig(tmp_path / "control.json").start()
    triton_model._supervisor, triton_model._output_processor = rig.supervisor, rig.streams
    triton_model._metrics = NoMetrics()
    nothing = types.SimpleNamespace(stop=lambda: None, close=lambda: None)
    for part in ("_drain", "_status", "_tokenize_pool", "_unload_detector", "_beat", "_registry_entry", "_spans"):
        setattr(triton_model, part, nothing)
    triton_model._peers = triton_model._adapters = nothing
    triton_model._adapter_metrics = None
    triton_model._chat = ChatTemplate(None)
    triton_model._group = None
    triton_model._tensors = types.SimpleNamespace(clear=lambda: None)
    rig.order(answer="never")
    client = RecordingClient()
    relay(rig.ask(), rig.streams, client)
    open_request = rig.open(orders="delay=0.01", max_tokens=1000)
    triton_model.finalize()
    for one in (client, open_request):
        assert one.wait().error == ("UNAVAILABLE", "the model is being unloaded")


def test_the_engine_loads_while_the_tokenizer_does_and_ends_if_there_is_none(
    tmp_path: Path, triton_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is the point: the engine is told to begin before the chat template is read."""
    module = sys.modules["inflight.model"]
    (tmp_path / "model.json").write_text('{"model": "nowhere"}')
    module.pb_utils.get_model_dir = lambda: str(tmp_path)
    events: list[str] = []
    supervisor = types.SimpleNamespace(begin=lambda: events.append("begin"), stop=lambda: events.append("stop"))
    monkeypatch.setattr(module, "Supervisor", lambda *_, **__: supervisor)
    monkeypatch.setattr(module, "find_group", lambda *_: None)
    monkeypatch.setattr(module, "close_inherited_sockets", lambda: None)
    monkeypatch.setattr(module, "bridge", types.SimpleNamespace(check_numpy=int, name_log=str, log=print))

    def load(*_: Any, **__: Any) -> None:
        events.append("template")
        raise ValueError("no template")

    monkeypatch.setattr(module.ChatTemplate, "load", load)
    with pytest.raises(ValueError, match="no template"):
        triton_model.initialize(
            {
                "model_config": '{"backend": "inflight"}',
                "model_name": "tiny",
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
            }
        )
    assert events == ["begin", "template", "stop"]


def test_a_stop_while_the_engine_loads_ends_it(tmp_path: Path) -> None:
    rig = SupervisorRig(tmp_path / "control.json")
    rig.order(start="hang")
    rig.supervisor.begin()
    engine = wait_for(lambda: rig.supervisor._engine_process)
    rig.supervisor.stop()
    assert not Path(f"/proc/{engine.pid}").exists()


def test_triton_is_told_that_a_model_is_ready_while_it_serves(tmp_path: Path, triton_model: Any) -> None:
    """Triton 24.10 does not ask; later releases call `is_ready` and insist on a bool."""
    rig = SupervisorRig(tmp_path / "control.json").start()
    drain = types.SimpleNamespace(draining=False)
    triton_model._supervisor, triton_model._drain = rig.supervisor, drain
    assert triton_model.is_ready() is True
    drain.draining = True
    assert triton_model.is_ready() is False
    drain.draining = False
    rig.order(start="exit")
    pid = rig.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: rig.supervisor.refusal)
    assert triton_model.is_ready() is False, "no engine can be started"
    rig.control.unlink()
    wait_for(lambda: rig.supervisor.pid)
    wait_for(lambda: triton_model.is_ready() is True)
    rig.stop()
    assert triton_model.is_ready() is False, "the model is being unloaded"


def test_callbacks_of_a_question_may_ask_again(rig: SupervisorRig) -> None:
    answers: list[bytes] = []
    asked = threading.Event()

    def again(first: Future[Any]) -> None:
        answers.append(first.result())
        rig.ask().add_done_callback(lambda second: (answers.append(second.result()), asked.set()))

    rig.ask().add_done_callback(again)
    assert asked.wait(20)
    assert answers == [b"answer 1", b"answer 2"]
