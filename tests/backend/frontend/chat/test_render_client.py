"""Chat templates that loop, grow or kill: each ends within its bounds, and the next request is served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_engine_rig import alive, wait_for

from inflight.frontend.chat import render_client as template_process
from inflight.frontend.chat.render_client import RenderClient
from inflight.frontend.chat.renderer import ChatTemplateError

SECONDS, SIZE = 0.3, 2**28
USER = json.dumps([{"role": "user", "content": "hello"}])
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
DOUBLE = "{% set ns = namespace(s='a' * 999) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"

SLOW = [LOOP, TWICE, "{{ (messages | length + 8) ** (9 ** 9) }}", "{{ range(9999) | map('string') | list * 99999 }}"]
LARGE = [DOUBLE, "{{ 'a' * 10 ** 10 }}", "{{ messages * 10 ** 9 }}"]
REJECTED = ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ range(10 ** 9) | length }}", "{{ 1 // 0 }}"]
BOMBS = "".join(
    f"{{% if messages[0].role == '{number}' %}}{bomb}{{% endif %}}"
    for number, bomb in enumerate([*SLOW, *LARGE, *REJECTED])
)
AT_COMPILE = "{{ 9 ** (9 ** 9) }}"  # Jinja computes constants when it compiles


def process(text: str, seconds: float = SECONDS) -> RenderClient:
    return RenderClient(text, {}, seconds, SIZE)


@pytest.fixture(scope="module")
def shared() -> Iterator[RenderClient]:
    """One process with every bomb: the role of the first message picks it."""
    renderer = process(BOMBS + "{{ messages[0].content }}")
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[RenderClient]:
    """The same process with so much time that memory is the bound."""
    renderer = process(BOMBS + "{{ messages[0].content }}", seconds=60)
    yield renderer
    renderer.close()


@pytest.mark.parametrize("number", range(len([*SLOW, *LARGE, *REJECTED])))
def test_a_bomb_ends_and_the_next_request_is_served(shared: RenderClient, patient: RenderClient, number: int) -> None:
    is_slow, is_large = number < len(SLOW), len(SLOW) <= number < len([*SLOW, *LARGE])
    says = "took more than 0.3 s" if is_slow else "needs more than 256 MiB" if is_large else "rejected the messages"
    if "list *" in [*SLOW, *LARGE, *REJECTED][number]:  # the bound that it meets first depends on the machine
        says = "took more than 0.3 s|needs more than 256 MiB"
    renderer = patient if is_large else shared
    with pytest.raises(ChatTemplateError, match=says):
        renderer.render(json.dumps([{"role": str(number), "content": "never"}]))
    assert renderer.render(USER) == "hello"


def test_a_bomb_that_goes_off_when_it_is_compiled() -> None:
    renderer = process(AT_COMPILE)
    for ask in (renderer.check, lambda: renderer.render(USER)):
        with pytest.raises(ChatTemplateError, match=r"took more than 0.3 s"):
            ask()
    renderer.close()


def test_text_without_end_is_refused() -> None:
    renderer = process("{{ messages[0].content * 9 }}", seconds=9)
    with pytest.raises(ChatTemplateError, match=r"made 72\d{6} bytes of text"):
        renderer.render(json.dumps([{"role": "user", "content": "a" * 8_000_000}]))
    assert renderer.render(USER) == "hello" * 9
    renderer.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.text() | st.recursive(st.none() | st.booleans() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_rendered_or_refused(shared: RenderClient, messages: str) -> None:
    with pytest.raises(ChatTemplateError):
        shared.render(messages)


@pytest.mark.parametrize("messages", ['[{"role": "user", "content": "\\ud800"}]', "[" * 100_000, "\ud800"])
def test_what_is_no_text_is_refused(shared: RenderClient, messages: str) -> None:
    with pytest.raises(ChatTemplateError, match="not valid JSON"):
        shared.render(messages)


# -- the process itself -----------------------------------------------------------------------------


def test_a_process_that_is_killed_is_replaced() -> None:
    renderer = process("{{ messages[0].content }}")
    assert renderer.render(USER) == "hello"
    for number in (signal.SIGKILL, signal.SIGSEGV):
        assert renderer._popen is not None
        os.kill(renderer._popen.pid, number)
        assert renderer.render(USER) == "hello"
    renderer.close()


def stopped(renderer: RenderClient) -> None:
    """Its process is stopped; the one that replaces it has all the time that it needs."""
    start, popen = renderer._start, renderer._popen
    assert popen is not None

    def start_another() -> None:
        renderer._patience = 60
        start()

    renderer._start = start_another  # type: ignore[method-assign]
    os.kill(popen.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, popen.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("length", [10, 10**6])  # the second one does not fit into the socket
def test_a_process_that_is_stopped_is_replaced_and_the_chat_is_rendered(length: int) -> None:
    renderer = RenderClient("{{ messages[0].content }}", {}, 5, SIZE)
    renderer._patience = 1
    renderer.check()
    stopped(renderer)
    text = "a" * length
    assert renderer.render(json.dumps([{"role": "user", "content": text}])) == text
    renderer.close()


def test_a_process_that_is_stopped_while_it_sends_is_replaced() -> None:
    renderer = RenderClient("{{ messages[0].content * 10**6 }}", {}, 5, SIZE)
    renderer._patience = 1
    renderer.check()
    popen, ours = renderer._popen, renderer._connection
    assert popen is not None and ours is not None
    ours.send_bytes(USER.encode())
    assert ours.poll(60)
    while process_state(popen.pid) != "S":  # there is no room for more
        time.sleep(0.01)
    stopped(renderer)
    assert renderer._ask(None, 0.1) is None
    assert renderer.render(USER) == "hello" * 10**6
    renderer.close()


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_is_only_late_fails_its_chat() -> None:
    renderer = process(LOOP, seconds=3600)
    renderer.check()
    renderer._patience = 0.2
    with pytest.raises(ChatTemplateError, match="took more than"):
        renderer.render(USER)
    renderer.close()


def test_closing_ends_a_bomb_and_refuses_the_rest() -> None:
    renderer = process(LOOP, seconds=3600)
    renderer.check()
    failed: list[str] = []

    def ask() -> None:
        with pytest.raises(ChatTemplateError) as error:
            renderer.render(USER)
        failed.append(str(error.value))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    popen = renderer._popen
    assert popen is not None
    while float(Path(f"/proc/{popen.pid}/stat").read_text().split()[13]) == 0:
        time.sleep(0.01)  # it has not begun
    renderer.close()
    for thread in asking:
        thread.join(20)
    assert failed == ["the model is being unloaded"] * 3
    assert popen.poll() is not None


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import sys, os, signal; from inflight.frontend.chat.render_client import RenderClient\n"
        "renderer = RenderClient('x', {}, 2.0); renderer.check(); print(renderer._popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    wait_for(lambda: not alive(pid))


def test_the_process_does_not_see_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(template_process._HIDDEN, "secret")
    renderer = process("x")
    renderer.check()
    assert renderer._popen is not None
    assert b"secret" not in Path(f"/proc/{renderer._popen.pid}/environ").read_bytes()
    renderer.close()
