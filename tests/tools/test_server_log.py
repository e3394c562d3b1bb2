"""Reasons found in a tritonserver's log."""

from __future__ import annotations

from pathlib import Path

from inflight_tools.server_log import LoadingModels, end_reason

START = """\
W1122 16:38:02.626806 30476 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
Error: Failed to initialize NVML
E1122 16:38:02.627268 30476 server.cc:241] "CudaDriverHelper has not been initialized."
I1122 16:38:02.630371 30476 model_lifecycle.cc:472] "loading: demo:1"
"""


def test_why_the_server_ended() -> None:
    for log, says in [
        (START, 'I1122 16:38:02.630371 30476 model_lifecycle.cc:472] "loading: demo:1"'),
        ('E1122 16:38:03.1 7 http_server.cc:1] "Address already in use"\n', "Address already in use"),
        ("error: creating server: Internal\n", "creating server: Internal"),
        ("bin/tritonserver: unrecognized option '--x'\n", "unrecognized option '--x'"),
        ("terminate called without an active exception\n", "terminate called without an active exception"),
        (
            "terminate called after throwing an instance of 'std::out_of_range'\n  what():  basic_string\nmore\n",
            "terminate called after throwing an instance of 'std::out_of_range' what(): basic_string",
        ),
        ("free(): invalid pointer\nSignal (6) received.\n 0# 0x1 in bin/tritonserver\n", "free(): invalid pointer"),
        ("double free or corruption (!prev)\nSignal (6) received.\n", "double free or corruption (!prev)"),
        ("", "(the log is empty)"),
    ]:
        assert end_reason(log) == says
        if log != START:
            assert end_reason(START + log) == (says if log else end_reason(START)), (
                "each start without a GPU logs these"
            )


READY = '"[inflight] {}: float32 on cpu, max_model_len=256, 16 KV blocks of 16 tokens, loaded in 0.4 s"\n'
BEGUN = 'I1 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: {} (CPU device 0)"\n'


def test_a_model_that_triton_forgets_after_it_was_ready(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    loading = LoadingModels(log, 0, 900.0)

    def says(now: float, *lines: str) -> str | None:
        with open(log, "a") as file:
            file.write("".join(lines))
        return loading.failure(now)

    assert (
        says(0.0, 'x] "loading: a:1"\n', 'x] "loading: a_b:1"\n', BEGUN.format("a_0"), BEGUN.format("a_b_0_0")) is None
    )
    assert says(1.0, BEGUN.format("a_b_0_1"), READY.format("a_b"), READY.format("a")) is None
    assert says(2.0, "x] \"successfully loaded 'a'\"\n") is None
    assert says(300.0) is None, "one of two instances still loads"
    assert says(301.0, READY.format("a_b")) is None
    assert says(320.0) is None
    assert says(322.0) == "model 'a_b' was neither loaded nor refused, 20 s after its stub was ready"
    assert says(323.0, "E] \"failed to load 'a_b' version 1: Internal: no\"\n") is None
    assert says(324.0, 'x] "loading: a:1"\n', BEGUN.format("mine_0"), READY.format("a")) is None
    assert says(800.0) is None, "the number of instances of a named group is unknown"


def test_a_log_that_is_gone_says_nothing(tmp_path: Path) -> None:
    assert LoadingModels(tmp_path / "log", 0, 1.0).failure(5.0) is None
