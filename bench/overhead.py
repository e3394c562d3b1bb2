#!/usr/bin/env python3
"""The cost of serving through Triton: tokens/s over gRPC streaming compared with the engine in-process.

    python bench/overhead.py [--requests 64] [--rounds 3] [--output FILE]
    python bench/overhead.py --frontends 1 2 4     the cost of a response against the number of stubs (sending.py)

Same checkpoint, requests and threads; all requests are submitted at once, 32 sequences per step.  The
in-process side is nothing but `EngineCore.step()` in a loop: no text, no process boundary.  The other side
is a real tritonserver on 127.0.0.1 that streams text and token ids of every request to a client process
on the same machine, whose work counts against it: once with `stream_interval: 1`, once with the default, "auto".
Time counts once the server rests: its spare engine process has done its imports then.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from typing import Any

import common
import serving


def run_in_process(arguments: dict[str, Any]) -> common.Run:
    core = common.engine(common.engine_options(arguments))
    requests = common.workload(arguments["requests"])
    common.generate(core, common.short(requests))
    return common.timed(lambda: common.generate(core, requests))


def run_through_triton(arguments: dict[str, Any], **options: Any) -> common.Run:
    requests = common.workload(arguments["requests"])
    answers: list[serving.Answer] = []

    def stream() -> int:
        answers[:] = serving.stream_all(server.grpc_address, requests)
        return sum(len(answer.token_ids) for answer in answers)

    with serving.served({**common.engine_options(arguments), **options}) as server:
        serving.stream_all(server.grpc_address, common.short(requests))
        serving.wait_for_rest(server)
        run = common.timed(stream)
    gaps = sorted(1e3 * (b - a) for answer in answers for a, b in pairwise(answer.times))
    return {
        **run,
        "responses": sum(len(answer.times) for answer in answers),
        "gap_ms": {f"p{percent}": common.percentile(gaps, percent) for percent in (50, 90, 99)},
    }


SIDES = {
    "in-process": run_in_process,
    "every token": partial(run_through_triton, stream_interval=1),
    "tritonserver + gRPC": run_through_triton,
}


if __name__ == "__main__" and "--frontends" in sys.argv:
    import sending

    sending.main()
elif __name__ == "__main__":
    common.compare(__file__, __doc__, SIDES)
