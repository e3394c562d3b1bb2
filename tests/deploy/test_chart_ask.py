"""`helm test`, and the commands in the chart's notes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from charts import CASES, FULLNAME, NAMESPACE, ROOT, notes, of_kind, only, render, selects, values_of

ASK = ROOT / "deploy" / "container" / "inflight-ask"
KEYS = "# of the batch job\n\nfirst-key\nsecond-key\n"


class FakeGateway(BaseHTTPRequestHandler):
    """Ready at the second question; asks for `first-key`; has the model `demo`.  Errors are in the gateway's form."""

    asked: ClassVar[list[Any]] = []

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if len(self.asked) == 1:
            self._fail(503, "no model is ready")
        else:
            self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body["model"]))
        if self.headers["Authorization"] != "Bearer first-key":
            self._fail(401, "this server needs an API key")
        elif body["model"] != "demo":
            self._fail(404, f"The model '{body['model']}' does not exist; models here: demo")
        else:
            self._answer(200, {"choices": [{"text": "!"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def gateway() -> Iterator[str]:
    FakeGateway.asked = []
    server = HTTPServer(("127.0.0.1", 0), FakeGateway)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ASK), *arguments], capture_output=True, text=True, timeout=60)


def test_it_waits_for_the_gateway_and_asks_with_the_first_key(gateway: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    ended = ask(gateway, "demo", f"--api-key-file={tmp_path / 'keys'}")
    assert ended.returncode == 0 and ended.stdout == "demo: 1 token after a prompt of 1\n", ended.stderr
    assert FakeGateway.asked == ["/ready", "/ready", ("/v1/completions", "demo")]


def test_it_fails_with_what_the_gateway_said(gateway: str, tmp_path: Path) -> None:
    ended = ask(gateway, "demo")
    assert ended.returncode == 1 and "this server needs an API key" in ended.stderr
    (tmp_path / "keys").write_text(KEYS)
    ended = ask(gateway, "demo", "qwen", f"--api-key-file={tmp_path / 'keys'}")
    assert ended.returncode == 1 and "qwen: " in ended.stderr and "models here: demo" in ended.stderr
    (tmp_path / "keys").write_text("# none yet\n")
    assert "has no keys" in ask(gateway, "demo", f"--api-key-file={tmp_path / 'keys'}").stderr


def test_without_a_gateway_it_gives_up() -> None:
    ended = ask("http://127.0.0.1:1", "demo", "--timeout=0")
    assert ended.returncode == 1 and ended.stderr.startswith("/ready: ")


@pytest.mark.parametrize("case", CASES)
def test_helm_test_asks_the_service_for_each_model(case: str) -> None:
    found, values = render(values_of(case)), values_of(case)
    pod = only(found, "Pod", name=f"{FULLNAME}-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test" and pod["spec"]["restartPolicy"] == "Never"
    (container,) = pod["spec"]["containers"]
    program, url, *rest = container["args"]
    assert program == ASK.name and rest[0] == values.get("model", {}).get("name", "demo")
    name, port = re.fullmatch(r"https?://(.+):(\d+)", url).groups()  # type: ignore[union-attr]
    assert int(port) in [one["port"] for one in only(found, "Service", name=name)["spec"]["ports"]]
    has_keys = "apiKeysSecret" in values.get("gateway", {})
    assert ("--api-key-file=/etc/inflight/api-keys/api-keys" in rest) == has_keys
    has_tls = "tls" in values.get("gateway", {})
    assert url.startswith("https://") == ("--insecure" in rest) == has_tls
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["capabilities"]
    for policy in of_kind(found, "NetworkPolicy"):
        rules = [rule for rule in policy["spec"]["ingress"] if {"port": "openai", "protocol": "TCP"} in rule["ports"]]
        peers = [peer.get("podSelector", {}).get("matchLabels", {}) for rule in rules for peer in rule.get("from", [])]
        everybody = any("from" not in rule for rule in rules)
        assert everybody or any(selects(labels, pod["metadata"]["labels"]) for labels in peers)
    for service in of_kind(found, "Service"):
        assert not selects(service["spec"]["selector"], pod["metadata"]["labels"])


# -- the notes -----------------------------------------------------------------------------


def commands(values: dict[str, Any]) -> list[str]:
    return [line.strip() for line in notes(values).splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("case", CASES)
def test_the_commands_of_the_notes_name_what_the_chart_renders(case: str) -> None:
    values = values_of(case)
    found, said = render(values), commands(values)
    (kind, name) = re.search(r"rollout status (\w+)/(\S+)", said[0]).groups()  # type: ignore[union-attr]
    assert only(found, "Deployment", "StatefulSet", name=name)["kind"].lower() == kind
    (forward,) = [line for line in said if "port-forward" in line]
    name, port = re.search(r"service/(\S+) 9000:(\d+)", forward).groups()  # type: ignore[union-attr]
    assert int(port) in [one["port"] for one in only(found, "Service", name=name)["spec"]["ports"]]
    assert all(f"--namespace {NAMESPACE}" in line for line in said if "kubectl" in line or line.startswith("helm"))
    assert any(line.startswith("helm test prod ") for line in said)
    assert all(subprocess.run(["sh", "-n", "-c", line]).returncode == 0 for line in said), "the shell can read them"


def test_the_notes_make_the_secret_that_the_pods_mount() -> None:
    values = {"gateway": {"apiKeysSecret": {"name": "clients", "key": "keys.txt"}}}
    (made,) = [line for line in commands(values) if "create secret" in line]
    assert "create secret generic clients --from-literal=keys.txt=" in made
    (read,) = [line for line in commands(values) if line.startswith("KEY=")]
    assert r"get secret clients -o jsonpath='{.data.keys\.txt}'" in read
    volumes = only(render(values), "Deployment")["spec"]["template"]["spec"]["volumes"]
    (mounted,) = [one["secret"] for one in volumes if one["name"] == "api-keys"]
    assert mounted["secretName"] == "clients" and mounted["items"] == [{"key": "keys.txt", "path": "api-keys"}]
    assert not [line for line in commands({}) if "secret" in line]


def test_the_install_texts_make_the_secret_that_they_name() -> None:
    for page in (ROOT / "docs" / "fleet" / "kubernetes.md", ROOT / "deploy" / "helm" / "inflight" / "README.md"):
        text = page.read_text()
        assert "--set gateway.apiKeysSecret.name=api-keys" in text
        made = text.index("create secret generic api-keys --from-literal=api-keys=")
        assert made < text.index("helm install "), "the pods wait for it"


def selector_of(removal: str) -> tuple[dict[str, str], str]:
    """The labels of a removal's Services, and the version that it spares."""
    (present,) = re.findall(r"inflight-peers!=(\w+)", removal)
    return dict(part.split("=") for part in re.findall(r"[\w./-]+=[\w-]+", removal)), present


def test_each_of_several_stateful_sets_keeps_the_services_of_the_others() -> None:
    values = {"workload": {"kind": "StatefulSet"}, "models": [{"model": {"name": name}} for name in ("a", "b")]}
    removals = [selector_of(line) for line in commands(values) if "delete service" in line]
    kept = [one["metadata"]["labels"] for one in of_kind(render(values), "Service")]
    versions = [labels for labels in kept if "inflight-peers" in labels]
    assert [present for _, present in removals] == [labels["inflight-peers"] for labels in versions]
    for labels, (wanted, present) in zip(versions, removals):
        chosen = [one for one in versions if selects(wanted, one) and one["inflight-peers"] != present]
        assert not chosen and selects(wanted, labels)


def test_a_stateful_sets_notes_say_how_to_remove_services_of_earlier_versions() -> None:
    values = {"workload": {"kind": "StatefulSet"}}
    (removal,) = [line for line in commands(values) if "delete service" in line]
    assert not [line for line in commands({}) if "delete service" in line]
    wanted, present = selector_of(removal)
    kept = [one for one in of_kind(render(values), "Service") if "inflight-peers" in one["metadata"]["labels"]]
    assert [one["metadata"]["labels"]["inflight-peers"] for one in kept] == [present]
    assert wanted.items() <= kept[0]["metadata"]["labels"].items()
