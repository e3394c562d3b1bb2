"""The container: unprivileged, with an admin key, and a tag that was reviewed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from inflight_tools import admin

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
START = ROOT / "deploy" / "container" / "inflight-tritonserver"
GATEWAY = START.with_name("inflight-gateway")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
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


def test_compose_runs_both_and_publishes_them_on_this_machine_only() -> None:
    services = COMPOSE["services"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    command = services["gateway"]["command"]
    assert command[0] == GATEWAY.name and command[command.index("--triton") + 1] == "triton:8001"
    assert {service["image"] for service in services.values()} == {"inflight"}


def test_a_key_that_triton_cannot_take_is_refused(start) -> None:
    for key in ["short", "k" * 257, "a:key,with=others", "a key with spaces", "k" * 16 + "\n", "$(id)" * 4]:
        ended = start(INFLIGHT_ADMIN_KEY=key)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert "16 to 256 characters" in ended.stderr
