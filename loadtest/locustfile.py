"""Locust's entry point: constant users, a ramp, or an open loop, on any endpoint.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000 --scenario lognormal --context 2048
    locust -f loadtest/locustfile.py GrpcUser --host 127.0.0.1:8001 --model demo --headless --users 8 --csv out
    locust -f loadtest/locustfile.py --host 127.0.0.1:8001 --scenario month-end --shape ramp --headless

The web UI, `--headless`, `--csv`, `--run-time` and the rest are Locust's.  The web UI shows the options below, and
starts each swarm with what its form says, host and model included.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gevent
import grpc.experimental.gevent as grpc_gevent
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from inflight_tools.workload.errors import WorkloadError
from loadtest import shapes
from loadtest.clients import KINDS, connect, find_kind
from loadtest.embedding_users import EmbeddingUser
from loadtest.errors import LoadTestError
from loadtest.openai_client import KEY_VARIABLE
from loadtest.options import LoadOptions, add_arguments
from loadtest.targets import sole_model
from loadtest.users import EndpointUser, GrpcUser, OpenAIUser, RequestFeed, SseUser, StreamingUser

__all__ = ["EmbeddingUser", "EndpointUser", "GrpcUser", "OpenAIUser", "SseUser"]

grpc_gevent.init_gevent()  # before the first channel, so that gRPC waits in gevent's loop


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    kinds = ["auto", *KINDS]
    parser.add_argument("--kind", choices=kinds, default="auto", help="What the host speaks; auto asks it.")
    parser.add_argument("--model", default="", help="Model on the server; empty takes its only one.")
    parser.add_argument(
        "--api-key", default="", is_secret=True, help=f"Of an OpenAI API; empty takes {KEY_VARIABLE} for --host."
    )
    parser.add_argument("--shape", choices=shapes.SHAPES, default="auto", help=shapes.HELP)
    add_arguments(parser)
    parser.add_argument(
        "--record", default="", include_in_web_ui=False, help="Write one JSON line per request to this file."
    )
    parser.add_argument("--traits", default="", include_in_web_ui=False, help="Of an endpoint that has been checked.")


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    """Without a web UI check everything at once: wrong input is one line and status 2."""
    parsed: Any = environment.parsed_options
    _Start.host = environment.host or ""
    _Start.record = Path(parsed.record) if parsed.record else None
    if _Start.record is not None:
        _Start.record.write_text("", encoding="utf-8")
    if not parsed.user_classes:
        environment.user_classes = [EndpointUser]
    try:
        shapes.use(environment)
        if not environment.web_ui:
            _prepare(environment)
    except WorkloadError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    """In the web UI, a wrong input ends the swarm and is shown among its exceptions."""
    try:
        if environment.web_ui:
            _prepare(environment)
    except WorkloadError as error:
        assert environment.runner is not None
        environment.runner.log_exception("local", f"loadtest: {error}", "")
        gevent.spawn(environment.runner.stop)
        raise gevent.GreenletExit from None
    StreamingUser.feed.start()


@events.quitting.add_listener
def _close(**_: Any) -> None:
    if (feed := getattr(StreamingUser, "feed", None)) is not None:
        feed.close()


class _Start:
    """The command line's host and record: the web UI must neither send its key elsewhere nor choose files."""

    host = ""
    record: Path | None = None


def _prepare(environment: Environment) -> None:
    """Check the endpoint, and prepare the load.

    Raises:
        WorkloadError: wrong input, no server, or a load that does not fit.
    """
    _close()
    parsed: Any = environment.parsed_options
    options = LoadOptions.from_arguments(parsed)
    users = [user for user in environment.user_classes if issubclass(user, StreamingUser)]
    if len({user.kind for user in users}) > 1:
        names = ", ".join(sorted(user.__name__ for user in users))
        raise LoadTestError(f"{names} speak different protocols to one host; choose one of them")
    if not users:
        raise LoadTestError("EmbeddingUser embeds beside other users; name OpenAIUser, too")
    host = environment.host
    if not host:
        raise LoadTestError("give --host, such as HOST:8001 for gRPC, HOST:8000 for HTTP or HOST:9000 for a gateway")
    kind, address = find_kind(host, users[0].kind or parsed.kind.replace("auto", ""))
    key = parsed.api_key or (os.environ.get(KEY_VARIABLE, "") if host == _Start.host else "")
    if parsed.traits:
        client = connect(kind, address, parsed.model, key, json.loads(parsed.traits))
        options = options.for_client(client)
    else:
        model = parsed.model or sole_model(connect(kind, address, "", key), address)
        client = connect(kind, address, model, key)
        options = options.checked(client, model)
    StreamingUser.endpoint, StreamingUser.request_type = client, {"http": "sse"}.get(kind, kind)
    EmbeddingUser.model, EmbeddingUser.key, EmbeddingUser.seed = parsed.model, key, options.seed
    StreamingUser.feed = RequestFeed(options, environment, _Start.record)
