"""Locust's entry point: constant users, or an open loop.

    locust -f loadtest/locustfile.py GrpcUser --host 127.0.0.1:8001 --model demo --scenario lognormal --context 2048
    locust -f loadtest/locustfile.py SseUser --host http://127.0.0.1:8000 --headless --users 8 --csv out ...
    locust -f loadtest/locustfile.py OpenAIUser --host http://127.0.0.1:9000 ...

The web UI, `--headless`, `--csv`, `--run-time` and the rest are Locust's.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc.experimental.gevent as grpc_gevent
from locust import events
from locust.env import Environment

from inflight_tools.workload.errors import WorkloadError
from loadtest.clients import connect
from loadtest.errors import LoadTestError
from loadtest.options import LoadOptions, add_arguments
from loadtest.users import GrpcUser, OpenAIUser, RequestFeed, SseUser, StreamingUser

__all__ = ["GrpcUser", "OpenAIUser", "SseUser"]

grpc_gevent.init_gevent()  # before the first channel, so that gRPC waits in gevent's loop


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="Model on the server.")
    parser.add_argument("--record", default="", help="Write one JSON line per request to this file.")
    add_arguments(parser)


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    """Check everything once, then prepare the load; wrong input is one line and status 2."""
    parsed: Any = environment.parsed_options
    try:
        options = LoadOptions.from_arguments(parsed)
        users = [user for user in environment.user_classes if issubclass(user, StreamingUser)]
        for user in users:
            if not environment.host:
                raise LoadTestError(
                    "give --host, such as HOST:8001 for GrpcUser, HOST:8000 for SseUser or HOST:9000 for OpenAIUser"
                )
            user.triton = connect(user.protocol, environment.host, parsed.model)
            options.check(user.triton, parsed.model)
        StreamingUser.feed = RequestFeed(options, environment, Path(parsed.record) if parsed.record else None)
    except WorkloadError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@events.quitting.add_listener
def _close(**_: Any) -> None:
    StreamingUser.feed.close()


@events.test_start.add_listener
def _start(**_: Any) -> None:
    StreamingUser.feed.start()
