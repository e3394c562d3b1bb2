"""Reasons found in a tritonserver's log."""

from __future__ import annotations

from inflight_tools.server_log import end_reason

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
            expected = says if log else end_reason(START)
            assert end_reason(START + log) == expected, "each start without a GPU logs these"
