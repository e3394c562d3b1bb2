"""The fenced blocks of README.md and docs/, and what the tests do with each.

A block names its language.  Commands in `sh` blocks must be of a program in `PROGRAMS`; what cannot run in a test is in
`NOT_RUN` with the reason, and what runs in another form in `SUBSTITUTIONS`.  tests/test_snippets.py checks all blocks
without running them, tests/e2e/test_doc_snippets.py runs them.
"""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = [
    "LANGUAGES",
    "MODULES_ELSEWHERE",
    "NOT_RUN",
    "PAGES",
    "PROGRAMS",
    "ROOT",
    "SUBSTITUTIONS",
    "Block",
    "blocks_of",
    "commands",
    "logical_lines",
    "page_blocks",
    "quoted",
    "reason_not_to_run",
    "substituted",
]

ROOT = Path(__file__).parents[2]
_MARKDOWN = MarkdownIt("commonmark").enable("table")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Languages, and the titles that a block of each can have.  A title says what the text is.
LANGUAGES: dict[str, tuple[str, ...]] = {
    "sh": ("",),
    "python": ("",),
    "json": ("model.json", "multi_lora.json", "messages", "response"),
    "yaml": ("values.yaml",),
    "pbtxt": ("config.pbtxt",),
    "text": ("",),  # diagrams, formats, output: no command and no program
}

# The first words of commands.  tests/test_snippets.py checks their words where it can.
PROGRAMS = (
    "claude", "cp", "curl", "docker", "echo", "envoy", "export", "helm", "inflight", "jq", "kubectl", "lmcache",
    "locust", "make", "mkdir", "pip", "pytest", "python", "source", "tritonserver", "vllm-router",
)  # fmt: skip

# Modules that the tests' environment does not have: `make clients-env` makes one that does.
MODULES_ELSEWHERE = ("anthropic", "ollama")

# Lines of `sh` blocks, and whole `python` blocks, that no test runs: (pattern at the beginning of a line, reason).
NOT_RUN: list[tuple[str, str]] = [
    (
        r"from inflight import LLM, LoRARequest",
        "needs an adapter; tests/backend/in_process/test_lora.py has one",
    ),
    (r"inflight serve --model model\.gguf", "needs such a file; tests/e2e/test_demo.py serves one"),
    (
        r"inflight adapters (load|unload)|curl .*load_lora_adapter",
        "needs adapters; tests/e2e/test_adapters.py loads some",
    ),
    (r"lmcache server", "is in an environment of its own; tests/support/lmcache_rig.py starts it with these options"),
    (r"make ", "makes an environment or runs for minutes; the target is checked"),
    (r"pip install", "the tests' environment stays as it is; extras are checked"),
    (r"source \.venv/bin/activate", "the tests run in their own environment"),
    (r"docker ", "no Docker in the tests; tests/deploy/test_container.py and test_fleet_examples.py read these files"),
    (r"curl http://127\.0\.0\.1:9000/v1/models", "calls the services that docker compose would have started"),
    (r"helm ", "no cluster in the tests; the values are rendered with the chart"),
    (r"kubectl ", "no cluster in the tests"),
    (r"python -m loadtest run --url", "needs two servers, one of them with a GPU; tests/loadtest runs it"),
    (r"locust .*month-end", "a ramp takes minutes; tests/loadtest runs the shape"),
    (r"claude$|export ANTHROPIC_", "Claude Code is not installed; tests/e2e/test_anthropic.py sends what it sends"),
    (r"(OMP_NUM_THREADS=2 )?python (-m pytest tests/gpu|bench/gpu)", "needs a GPU; files and options are checked"),
    (r"export PYTHONPATH=\$PWD/DIR", "for a machine with a card"),
    (r"pytest tests/clients", "tests of make test-all"),
    (
        r"cp -r backend/inflight /opt/tritonserver",
        "writes to /opt; tests/e2e/test_copied_backend.py copies the backend",
    ),
    (r"tritonserver ", "of an installation in /opt; tests/e2e/test_copied_backend.py starts one with the copy"),
    (r"inflight gateway --routing prefix --triton replica-1", "three replicas; tests/e2e/test_fleet.py starts them"),
    (
        r"inflight gateway --triton qwen=replica-1",
        "three replicas; tests/gateway/test_model_upstreams.py has such gateways",
    ),
    (r"envoy -c", "in front of three gateways; tests/e2e/test_fleet.py starts it"),
    (r"vllm-router ", "in front of three gateways; tests/e2e/test_fleet.py starts it"),
    (r"out = scheduler\.schedule\(\)", "three lines of EngineCore.step"),
    (r"class TritonPythonModel", "crashes a tritonserver on purpose"),
]

# Replacements: (pattern, text that runs instead).  `Qwen/Qwen2.5-0.5B-Instruct` needs none: the tests run in a folder
# that has one of this name, with the demo checkpoint.
SUBSTITUTIONS: list[tuple[str, str]] = [
    (r"\bKEY\b", "key-of-the-tests-server"),
    (r"(?<=inflight serve )MODEL\b", "model_repository/demo/1/checkpoint"),
    (r"(?<=--model )CHECKPOINT\b", "model_repository/demo/1/checkpoint"),
    (r"(locust (?!.*--headless).*)", r"\1 --headless --users 2 --requests 4"),  # without it, it serves a web page
    (r"(inflight calibrate .*)", r"\1 --seconds 1"),
    (r"10\.0\.0\.1:8001,10\.0\.0\.2:8001", "127.0.0.1:1,127.0.0.1:8001"),  # the first does not answer
    (r"--replicas 200 (.*) --rate 400 --requests 20000", r"--replicas 8 \1 --rate 16 --requests 200"),
    (r"--requests 4000", "--requests 400"),
    (r"(?<=--sweep )max_num_seqs=8\.\.64,max_num_batched_tokens=256\.\.2048", "max_num_seqs=8..16"),
]


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: path from the root.
        line: of the fence, counted from 1.
    """

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@functools.cache
def page_blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page's text, in their order; an indented one has no language."""
    found = []
    for token in _MARKDOWN.parse(text):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.partition(" ")
            title = re.fullmatch(r'title="(.*)"', rest)
            assert token.map is not None
            found.append(Block(page, token.map[0] + 1, language, title[1] if title else rest, token.content))
    return found


def quoted(page: Path) -> list[str]:
    """Code in backticks within the sentences of a page."""
    tokens = _MARKDOWN.parse(page.read_text(encoding="utf-8"))
    return [child.content for token in tokens for child in token.children or () if child.type == "code_inline"]


def logical_lines(text: str) -> list[str]:
    """The lines of a script, joined where they end in a backslash; without comments and empty lines."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in map(str.strip, joined.splitlines()) if line and not line.startswith("#")]


def commands(line: str) -> list[list[str]]:
    """The words of each command of a line, without variables that are set in front of it and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if set(word) <= set("<>"):
            next(words, None)  # the file
        elif set(word) <= set("|&;()"):
            found.append([])
        elif found[-1] or not re.match(r"\w+=", word):
            found[-1].append(word)
    return [words for words in found if words]


def reason_not_to_run(text: str) -> str | None:
    """Why a line or a block does not run; None if it does."""
    return next((reason for pattern, reason in NOT_RUN if re.match(pattern, text)), None)


def substituted(text: str) -> str:
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text
