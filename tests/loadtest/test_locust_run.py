"""Real Locust runs against a real tritonserver with the demo model and the baseline."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from adapter_folders import write_adapter

from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports
from loadtest.server import checkpoint_folder, write_repository

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ADAPTERS = ("doll", "sheep")
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.xdist_group("loadtest")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A tritonserver with `inflight` and `baseline` on the demo checkpoint."""
    try:
        TritonInstallation.find()
    except LauncherError as error:
        pytest.skip(str(error))
    repository = tmp_path_factory.mktemp("repository")
    options = {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory": "64MiB", "max_num_seqs": 16}
    options["stream_interval"] = 1  # a response for each token: "auto" sends fewer on a busy machine
    checkpoint, adapters = checkpoint_folder("demo"), tmp_path_factory.mktemp("adapters")
    write_repository(repository, checkpoint, {**options, "enable_lora": True})
    folders = {name: write_adapter(adapters / name, seed=i, checkpoint=checkpoint) for i, name in enumerate(ADAPTERS)}
    written = json.dumps({name: str(folder) for name, folder in folders.items()})
    (repository / "inflight" / "1" / "multi_lora.json").write_text(written)
    with TritonServer(repository, exit_timeout=5) as server:
        yield server


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # The developer's Locust settings must not leak into the test.
    env = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")}
    env["PYTHONPATH"] = PYTHONPATH
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )


def _loadtest(server: TritonServer, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # The launcher's ports are not consecutive, so one address does not imply the others.
    addresses = ["--url", server.http_address, "--grpc", server.grpc_address, "--metrics", server.metrics_address]
    return _run("loadtest", "run", *addresses, *arguments, "--output", str(folder), folder=folder)


def _statistics(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def _rows(record: Path) -> list[dict[str, Any]]:
    first, *rows, last = map(json.loads, record.read_text(encoding="utf-8").splitlines())
    assert "begun" in first and last == {"sent": len(rows)}
    return rows


def test_both_models_over_grpc_make_a_report(server: TritonServer, tmp_path: Path) -> None:
    load = ["--context", "220", "--requests", "28", "--users", "14", "--rounds", "1"]
    done = _loadtest(server, *load, "--protocol", "grpc", "--sweep", "1", "--sweep-seconds", "1", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    for model in ("inflight", "baseline"):
        assert (data["models"][model]["requests"], data["models"][model]["lost"]) == (28, 0)
        assert len(data["sweep"][model]) == 1
    ours, theirs = (
        [row["tokens"] for row in data["runs"] if row["model"] == model] for model in ("inflight", "baseline")
    )
    assert ours == theirs and ours[0] > 100
    assert "Inflight is better by" in (tmp_path / "report.html").read_text(encoding="utf-8")

    streamed = _statistics(tmp_path / "inflight-round1_stats.csv")
    counts = {
        kind: sum(int(row["Request Count"]) for (k, _), row in streamed.items() if k == kind) for kind, _ in streamed
    }
    assert (counts["grpc"], counts["TTFT"]) == (28, 28)
    # Tokens that wait for a busy client arrive together: an answer that came all at once has neither.
    assert 0 < counts["TPOT"] <= 28 and counts["ITL"] >= counts["TPOT"]
    locked = {kind for kind, _ in _statistics(tmp_path / "baseline-round1_stats.csv")}
    assert locked == {"grpc", "TTFT", ""}
    # All users have a request open, and there are more users than gevent has native threads.
    rows = _rows(tmp_path / "baseline-round1.jsonl")
    # A user's next request starts as its last one ends, and the record rounds both.
    open_at = [sum(a["start"] <= b["start"] < a["start"] + a["latency"] - 0.01 for a in rows) for b in rows]
    assert max(open_at) == 14


@pytest.mark.parametrize("model", ["inflight", "baseline"])
def test_text_prompts_over_server_sent_events(server: TritonServer, tmp_path: Path, model: str) -> None:
    done = _run(
        *("locust", "-f", str(LOCUSTFILE), "SseUser", "--headless", "--host", f"http://{server.http_address}"),
        *("--model", model, "--scenario", "uniform", "--requests", "6", "--users", "3", "--spawn-rate", "9"),
        *("--prompt", "text", "--tokenizer", str(checkpoint_folder("demo"))),
        *("--record", "record.jsonl", "--csv", "run"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = _rows(tmp_path / "record.jsonl")
    assert [row["error"] for row in rows] == [None] * 6
    assert {sum(count for _, count in row["arrivals"]) for row in rows} == {64}
    # A busy machine may deliver many tokens in one response, but not all of them.
    assert {len(row["arrivals"]) > 1 for row in rows} == {model == "inflight"}
    assert int(_statistics(tmp_path / "run_stats.csv")[("sse", "uniform")]["Request Count"]) == 6


def test_openai_users_stream_from_a_gateway(
    server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(api_keys=("secret",)), ServerOptions(port=port, exit_timeout=2))
    gateway.start(server.grpc_address)
    host = f"http://127.0.0.1:{port}"
    locust = ["locust", "-f", str(LOCUSTFILE), "OpenAIUser", "--headless", "--host", host, "--model", "inflight"]
    load = ["--scenario", "uniform", "--requests", "6", "--users", "3", "--spawn-rate", "9", "--record", "record.jsonl"]
    try:
        refused = _run(*locust, *load, folder=tmp_path)
        assert refused.returncode == 2 and "set the environment variable OPENAI_API_KEY" in refused.stderr
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        done = _run(*locust, *load, "--csv", "run", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        gateway.stop()
    rows = _rows(tmp_path / "record.jsonl")
    assert [row["error"] for row in rows] == [None] * 6
    assert {sum(count for _, count in row["arrivals"]) for row in rows} == {64}
    assert all(len(row["arrivals"]) > 1 for row in rows)
    statistics = _statistics(tmp_path / "run_stats.csv")
    assert {int(statistics[(kind, "uniform")]["Request Count"]) for kind in ("openai", "TTFT")} == {6}
    gaps = sum(len(row["arrivals"]) - 1 for row in rows)
    assert int(statistics[("ITL", "uniform")]["Request Count"]) == gaps


@pytest.mark.parametrize("kind", ["grpc", "sse", "openai"])
def test_users_of_adapters(server: TritonServer, tmp_path: Path, kind: str) -> None:
    """Statistics of each; a report's table has them, too."""
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(), ServerOptions(port=port, exit_timeout=2))
    if kind == "openai":
        gateway.start(server.grpc_address)
    host = {"grpc": server.grpc_address, "sse": f"http://{server.http_address}"}.get(kind, f"http://127.0.0.1:{port}")
    locust = ["locust", "-f", str(LOCUSTFILE), "--headless", "--host", host, "--model", "inflight", "--csv", "run"]
    load = ["--scenario", "uniform", "--requests", "7", "--users", "3", "--spawn-rate", "9", "--record", "record.jsonl"]
    try:
        refused = _run(*locust, *load, "--adapters", "doll,llama", folder=tmp_path)
        assert refused.returncode == 2 and "inflight refuses adapter 'llama'" in refused.stderr
        done = _run(*locust, *load, "--adapters", "doll,sheep,", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        if kind == "openai":
            gateway.stop()
    rows = _rows(tmp_path / "record.jsonl")
    assert [row["error"] for row in rows] == [None] * 7
    assert sorted(row["adapter"] for row in rows) == ["", "", "doll", "doll", "doll", "sheep", "sheep"]
    statistics = _statistics(tmp_path / "run_stats.csv")
    for name, count in (("doll", 3), ("sheep", 2), ("no adapter", 2)):
        for figure in (kind, "TTFT"):
            assert int(statistics[figure, f"{name}, uniform"]["Request Count"]) == count


def test_a_report_with_adapters(server: TritonServer, tmp_path: Path) -> None:
    side = ["--url", server.grpc_address, "--model", "inflight", "--adapters", "doll,"]
    load = ["--context", "220", "--scenario", "uniform", "--requests", "8", "--users", "4", "--rounds", "1"]
    done = _run("loadtest", "run", *side, *load, "--sweep", "", "--output", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "doll, uniform" in page and "no adapter, uniform" in page


def test_a_user_embeds_texts_beside_chats(server: TritonServer, tmp_path: Path) -> None:
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(), ServerOptions(port=port, exit_timeout=2))
    gateway.start(server.grpc_address)
    locust = ["locust", "-f", str(LOCUSTFILE), "--headless", "--host", f"http://127.0.0.1:{port}", "--csv", "run"]
    load = ["--model", "inflight", "--scenario", "uniform", "--requests", "6", "--users", "3", "--spawn-rate", "9"]
    try:
        alone = _run(*locust, "EmbeddingUser", *load, folder=tmp_path)
        assert alone.returncode == 2 and "name OpenAIUser, too" in alone.stderr
        done = _run(*locust, "OpenAIUser", "EmbeddingUser", *load, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        gateway.stop()
    statistics = _statistics(tmp_path / "run_stats.csv")
    assert int(statistics[("openai", "uniform")]["Request Count"]) == 6
    embedded = statistics[("POST", "16 embeddings")]
    assert int(embedded["Request Count"]) >= 1 and int(embedded["Failure Count"]) == 0


def test_a_gateway_and_its_triton_side_by_side(server: TritonServer, tmp_path: Path) -> None:
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(api_keys=("secret",)), ServerOptions(port=port, exit_timeout=2))
    gateway.start(server.grpc_address)
    sides = ["--url", f"127.0.0.1:{port}", "--url", server.grpc_address, "--name", "gateway", "--name", "Triton"]
    sides += ["--model", "inflight", "--model", "inflight", "--api-key", "secret", "--api-key", ""]
    load = ["--context", "220", "--requests", "12", "--users", "4", "--rounds", "2", "--sweep", ""]
    try:
        done = _run("loadtest", "run", *sides, *load, "--output", str(tmp_path), folder=tmp_path)
    finally:
        gateway.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    data = json.loads(text)
    assert [side["name"] for side in data["sides"]] == ["gateway", "Triton"] and "secret" not in text
    assert [(row["model"], row["requests"], row["lost"]) for row in data["runs"]] == [
        ("gateway", 12, 0), ("Triton", 12, 0)
    ] * 2  # fmt: skip
    tokens = [row["tokens"] for row in data["runs"]]
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3]
    assert all(data["models"][name]["counted"] == ["server"] for name in ("gateway", "Triton"))
    assert "gateway is better by" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_open_loop_sends_when_requests_are_due(server: TritonServer, tmp_path: Path) -> None:
    done = _run(
        *("locust", "-f", str(LOCUSTFILE), "GrpcUser", "--headless", "--host", server.grpc_address),
        *("--model", "inflight", "--scenario", "lognormal", "--context", "200", "--requests", "10", "--users", "1"),
        *("--arrivals", "poisson", "--rate", "8", "--record", "record.jsonl"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = _rows(tmp_path / "record.jsonl")
    assert len(rows) == 10 and all(row["error"] is None for row in rows)
    assert all(row["start"] >= row["due"] for row in rows)


def test_bad_input_is_one_line_and_status_2_before_any_load(server: TritonServer, tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{pick_ports(1)[0]}"
    for arguments, said in (
        (["--models", "nothing,baseline"], "model 'nothing' is not ready"),
        (["--scenario", "chat-rag"], "--context N"),
        (["--scenario", "chat-rag", "--models", "baseline,inflight"], "--context N"),
        (["--grpc", nowhere, "--protocol", "grpc"], f"cannot reach {nowhere} by gRPC"),
        (["--http", nowhere, "--protocol", "http"], f"cannot reach {nowhere}"),
    ):
        done = _loadtest(server, *arguments, folder=tmp_path)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert said in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.jsonl"))


def test_bad_input_without_a_server(tmp_path: Path) -> None:
    for arguments, said in (
        (["--scenario", "weekly"], "choose one of"),
        (["--checkpoint", "demo", "--scenario", "chat-rag"], "--context 2048"),
        (["--checkpoint", "/nowhere"], "give one, or demo"),
        (["--checkpoint", "demo", "--context", "600", "--set", "max_num_sequences=4"], "did you mean 'max_num_seqs'?"),
        (["--sweep", "fast"], "shares of the capacity"),
        (["--adapters", "doll"], "Triton's batcher serves no adapters"),
    ):
        done = _run("loadtest", "run", *arguments, "--output", str(tmp_path / "out"), folder=tmp_path)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert said in done.stderr and done.stderr.count("\n") == 1
    host = f"127.0.0.1:{pick_ports(1)[0]}"
    for url in (host, f"http://{host}/v1"):
        done = _run("loadtest", "run", "--url", url, "--output", str(tmp_path / "out"), folder=tmp_path)
        assert done.returncode == 2 and f"cannot reach {url}" in done.stderr and done.stderr.count("\n") == 1
    locust = _run("locust", "-f", str(LOCUSTFILE), "SseUser", "--headless", "--host", host, folder=tmp_path)
    assert locust.returncode == 2 and f"cannot reach {host}" in locust.stderr


def _generate(server: TritonServer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://{server.http_address}/v2/models/{model}/generate"
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def test_the_baseline_gives_the_same_text_and_stops_each_request_at_its_own_length(server: TritonServer) -> None:
    bodies: list[dict[str, Any]] = [
        {"text_input": "Return a list of", "max_tokens": 30},
        {"text_input": "Raise ValueError if the argument is not", "max_tokens": 3},
        {"input_ids": [400, 401, 402, 403, 404, 405, 406], "max_tokens": 12},
        {"text_input": "The", "max_tokens": 1},
    ]
    asked = [{**body, "temperature": 0, "ignore_eos": True, "return_num_output_tokens": True} for body in bodies]
    with ThreadPoolExecutor(len(asked)) as pool:
        theirs = list(pool.map(lambda body: _generate(server, "baseline", body), asked))
        ours = list(pool.map(lambda body: _generate(server, "inflight", body), asked))
    assert [answer["num_output_tokens"] for answer in theirs] == [30, 3, 12, 1]
    assert [answer["text_output"] for answer in theirs] == [answer["text_output"] for answer in ours]
    assert {answer["finish_reason"] for answer in theirs} == {"length"}


def test_the_baseline_rejects_what_it_cannot_do(server: TritonServer) -> None:
    for body, said in [
        ({"text_input": "a", "stream": True}, "set it to false"),
        ({"text_input": "a", "input_ids": [1]}, "exactly one of text_input and input_ids"),
        ({"max_tokens": 3}, "exactly one of text_input and input_ids"),
        ({"text_input": "a", "max_tokens": 5000}, "2048 tokens together"),
        ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters"),
    ]:
        assert said in _generate(server, "baseline", body)["error"]
        assert "text_output" in _generate(server, "baseline", {"text_input": "a", "max_tokens": 1})


def test_a_server_that_dies_under_the_load_ends_the_run_and_says_where_to_look(tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["loadtest", "run", "--checkpoint", "demo", "--context", "220", "--requests", "100000", "--users", "4"]
    command += ["--set", "kv_cache_memory=64MiB", "--set", "cpu_threads=1", "--output", str(output)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        record = output / "inflight-round1.jsonl"
        _wait_until(lambda: record.exists() and record.stat().st_size > 0, process)
        for child in psutil.Process(process.pid).children(recursive=True):
            if child.name() == "tritonserver":
                child.kill()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "inflight, round 1/2: tritonserver ended with status -9" in said.decode()
    assert str(output / "server.log") in said.decode()


def _wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, "the load test ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.1)
