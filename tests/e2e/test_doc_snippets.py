"""The commands and programs of README.md and docs/ run, page by page, as a reader would type them.

Each page runs in a network of its own, so its ports are free, and in a folder that looks like a checkout.  A page that
starts a server uses that one.  All others share a server with the model `demo` and a gateway.  `snippets` lists what
does not run, with reasons, and what runs in another form.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import snippets
from snippets import ROOT, Block, logical_lines, page_blocks

pytestmark = pytest.mark.nightly

KEY = snippets.substituted("KEY")
SERVER = r"inflight (serve|gateway) "  # commands that run until they are stopped
READY_SECONDS, SCRIPT_SECONDS = 400, 400  # far more than a busy machine needs

# Pages that leave a server behind which other pages cannot use.
ALONE = {"docs/operations/monitor.md": "drains the model"}
# Pages that tests of their own run.
ELSEWHERE = {"docs/python.md": "tests/backend/in_process/test_python_page.py"}

# Turns the loopback interface on, says so, and lives until its input ends.
HOLDER = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
print(os.getpid(), flush=True)
sys.stdin.read()
"""


class Network:
    """A network namespace with nothing but a loopback interface; commands enter it."""

    def __init__(self) -> None:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            pytest.skip("no unshare and nsenter (util-linux)")
        command = ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--fork"]
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.pid = self.process.stdout.readline().strip()
        if not self.pid:
            pytest.skip(f"this machine has no user namespaces: {self.process.communicate()[1].strip()}")

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "--target", self.pid, "--user", "--net", "--preserve-credentials"]

    def close(self) -> None:
        self.process.communicate()  # closes its input


class Reader:
    """Someone who follows pages: a folder, a network, the variables that were exported, and the servers that run.

    Attributes:
        missing: blocks that need a module which this machine does not have.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = checkout(folder)
        self.network = Network()
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        folders = [ROOT, *(ROOT / name for name in ("backend", "client", "gateway", "tools"))]
        self.environment = {
            **os.environ,
            "PATH": programs,
            "PYTHONPATH": ":".join(map(str, folders)),
            "HF_HUB_OFFLINE": "1",
        }
        self.environment.pop("INFLIGHT_ADMIN_KEY", None)  # pages say where it is needed
        self.missing: list[str] = []
        self.servers: list[subprocess.Popen[str]] = []

    def follow(self, page: Path) -> None:
        """Run the blocks of a page in their order; skips the test at its end if something was missing."""
        self.missing.clear()
        before = self.environment
        for block in page_blocks(page):
            self.run(block)
        self.environment = before
        if self.missing:
            pytest.skip(f"make clients-env: {', '.join(self.missing)}")

    def run(self, block: Block) -> None:
        if block.language == "sh":
            self.run_script(block)
        elif block.language == "python" and not snippets.reason_not_to_run(block.text):
            self.run_program(block)
        elif block.title == "messages":
            body = json.dumps({"messages": block.text, "max_tokens": 4})
            self.script(block, f"curl -sf localhost:8000/v2/models/demo/generate -d '{body}'")

    def run_script(self, block: Block) -> None:
        pending: list[str] = []
        for line in logical_lines(block.text):
            if snippets.reason_not_to_run(line):
                continue
            line = snippets.substituted(line)
            if re.match(SERVER, line):
                self.script(block, "\n".join(pending))
                pending = []
                self.serve(line)
            else:
                pending.append(line)
        self.script(block, "\n".join(pending))

    def script(self, block: Block, text: str) -> None:
        """Variables that it exports stay, as in a terminal."""
        if not text:
            return
        kept = self.folder / ".exported"
        text = f"set -e\n{text}\nenv -0 > {kept}"
        self.check(block, ["bash", "-o", "pipefail", "-c", text])
        exported = dict(one.split("=", 1) for one in kept.read_text().split("\0") if "=" in one)
        self.environment = self.environment | {name: value for name, value in exported.items() if name != "_"}

    def run_program(self, block: Block) -> None:
        python = interpreter(block)
        if python is None:
            self.missing.append(block.where)
            return
        program = self.folder / ".program.py"
        program.write_text(snippets.substituted(block.text))
        self.check(block, [python, str(program)])

    def check(self, block: Block, command: list[str]) -> None:
        ended = self.command(command)
        said = f"{block.where}\n{block.text}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}\n{self.log()[-3000:]}"
        assert ended.returncode == 0, said
        assert '{"error"' not in ended.stdout, said

    def command(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.network.enter, *command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_SECONDS,
        )

    def serve(self, line: str) -> None:
        """Start a server and wait until it is ready; one that runs already is stopped, unless this is a gateway.

        A server without an admin key gets the tests' one instead of a random one, which a reader would copy.
        """
        if line.startswith("inflight serve"):
            self.stop_servers()
            if "INFLIGHT_ADMIN_KEY" not in self.environment:
                line = line.replace("inflight serve", f"inflight serve --admin-key {KEY}", 1)
        log = self.folder / f".server{len(self.servers)}.log"
        command = [*self.network.enter, "bash", "-c", f"exec {line}"]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=log.open("w"), stderr=subprocess.STDOUT, text=True
        )
        self.servers.append(process)
        addresses = ["localhost:8000/v2/health/ready"] if line.startswith("inflight serve") else []
        addresses += [f"localhost:{port}/health/ready" for port in re.findall(r"--(?:openai-)?port (\d+)", line)]
        deadline = time.monotonic() + READY_SECONDS
        while not all(map(self.answers, addresses)):
            assert process.poll() is None and time.monotonic() < deadline, f"{line}\n{log.read_text()[-3000:]}"
            time.sleep(0.2)

    def answers(self, address: str) -> bool:
        command = [*self.network.enter, "curl", "--silent", "--fail", "--output", "/dev/null", address]
        return subprocess.run(command, check=False).returncode == 0

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(".server*.log")))

    def stop_servers(self) -> None:
        for process in reversed(self.servers):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            assert process.returncode == 0, self.log()[-3000:]
        self.servers.clear()

    def close(self) -> None:
        try:
            self.stop_servers()
        finally:
            self.network.close()


def checkout(folder: Path) -> Path:
    """A folder as a checkout has it, whose files can be read, beside what a reader would bring along."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    hub = folder / "Qwen" / "Qwen2.5-0.5B-Instruct"  # what the hub would give
    hub.parent.mkdir()
    hub.symlink_to(ROOT / "model_repository" / "demo" / "1" / "checkpoint")
    rows = [f"{second / 2},{100 + second},{20 + second % 30}" for second in range(100)]
    (folder / "requests.csv").write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows]))
    return folder


def interpreter(block: Block) -> str | None:
    """The Python with the modules of a program: this one, or that of `make clients-env`; None if that is missing."""
    elsewhere = [
        name for name in snippets.MODULES_ELSEWHERE if re.search(rf"(?m)^(?:from|import) {name}\b", block.text)
    ]
    if not elsewhere:
        return sys.executable
    python = Path(os.environ.get("INFLIGHT_CLIENTS_ENV", ROOT / ".venv-clients")) / "openai3" / "bin" / "python"
    return str(python) if python.exists() else None


def runs(block: Block) -> bool:
    return block.language in ("sh", "python") or block.title == "messages"


def starts_a_server(page: Path) -> bool:
    lines = [line for block in page_blocks(page) if block.language == "sh" for line in logical_lines(block.text)]
    served = any(re.match("inflight serve ", line) and not snippets.reason_not_to_run(line) for line in lines)
    return served or str(page.relative_to(ROOT)) in ALONE


@contextmanager
def reader(folder: Path, serving: bool) -> Iterator[Reader]:
    found = Reader(folder)
    try:
        if serving:
            checkpoint = "model_repository/demo/1/checkpoint"
            found.serve(f"inflight serve {checkpoint} --name demo --openai-port 9000 --set step_trace=true")
            found.command(["inflight", "generate", "Return a list of", "--max-tokens", "4"])  # a trace needs steps
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def shared(triton_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with reader(tmp_path_factory.mktemp("checkout"), serving=True) as found:
        yield found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUN = [page for page in snippets.PAGES if any(map(runs, page_blocks(page))) and name(page) not in ELSEWHERE]
SERVERS = [page for page in RUN if starts_a_server(page)]
CLIENTS = [page for page in RUN if page not in SERVERS]


@pytest.mark.parametrize("page", SERVERS, ids=name)
def test_a_page_with_a_server_of_its_own(page: Path, triton_installed: None, tmp_path: Path) -> None:
    with reader(tmp_path, serving=name(page) in ALONE) as alone:
        alone.follow(page)


@pytest.mark.parametrize("page", CLIENTS, ids=name)
def test_a_page(page: Path, shared: Reader) -> None:
    shared.follow(page)
