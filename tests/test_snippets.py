"""The commands and programs of README.md and docs/ are valid; tests/e2e/test_doc_snippets.py runs them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import snippets
import typer
import yaml
from google.protobuf import text_format
from snippets import ROOT, Block, commands, logical_lines, page_blocks
from tritonclient.grpc import model_config_pb2

from inflight.config import EngineConfig
from inflight_tools.cli import app

BLOCKS = [block for page in snippets.PAGES for block in page_blocks(page)]
LINES = [(block, line) for block in BLOCKS if block.language == "sh" for line in logical_lines(block.text)]
COMMANDS = [(block, words) for block, line in LINES for words in commands(line)]
GROUP: Any = typer.main.get_command(app)
# Code within sentences: (page, text).
QUOTED = [(str(page.relative_to(ROOT)), text) for page in snippets.PAGES for text in snippets.quoted(page)]


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        titles = snippets.LANGUAGES.get(block.language)
        assert titles is not None, f"{block.where}: language {block.language!r}; use one of {[*snippets.LANGUAGES]}"
        assert block.title in titles, f"{block.where}: title {block.title!r} of a {block.language} block: {titles}"


def test_no_command_hides_in_a_text_block() -> None:
    for block in of_language("text"):
        if block.page == "docs/reference/commands.md":
            continue  # how each command is called, with its arguments' names
        first = [line.split()[0] for line in block.text.splitlines() if line[:1].strip()]
        hidden = {*first} & {*snippets.PROGRAMS} - {"tritonserver"}  # whose processes are drawn
        assert not hidden, f"{block.where}: a block with {hidden} is sh"
        command = re.search(r"(?m)^(?:\$ .*|[a-z][\w./-]*(?: \S+)* --?[a-z].*)$", block.text)
        assert command is None, f"{block.where}: {command[0]!r} looks like a command: a block with commands is sh"


# -- sh


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, or None, and the other words."""
    command = GROUP
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return (None if command is GROUP else command), words
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_inflight(words: list[str]) -> str:
    """Parsed as the command line parses it, without running it."""
    command, rest = command_of(words[1:])
    if command is None:
        return f"no command {words[1:3]}"
    try:
        command.make_context(words[1], rest)
    except Exception as error:  # of typer's or click's many kinds
        return f"{type(error).__name__}: {error}"
    return ""


def check_make(words: list[str]) -> str:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"(?m)^\.PHONY: (.*)$", makefile)
    assert targets
    given = [word for word in words[1:] if "=" not in word]
    variables = {word.split("=")[0] for word in words[1:] if "=" in word} - {"SOAK_MINUTES"}  # of the environment
    unknown = {*given} - {*targets[1].split()} | {name for name in variables if f"\n{name} ?=" not in makefile}
    return f"Makefile has no {unknown}" if unknown else ""


def check_pip(words: list[str]) -> str:
    project = (ROOT / "pyproject.toml").read_text()
    for word in words:
        extras = re.fullmatch(r"(?:\.|triton-inflight)\[(.*)\]", word)
        missing = [
            one for one in (extras[1].split(",") if extras else []) if not re.search(rf"(?m)^{one} = \[", project)
        ]
        if missing:
            return f"no extra {missing}"
    return "" if words[1] == "install" else f"pip {words[1]}"


def check_files(words: list[str]) -> str:
    """Every file of the repository that is named exists."""
    named = [word for word in words if re.fullmatch(r"(?:[\w.-]+/)+[\w.-]*", word)]
    made = ("models/", "Qwen/")  # by the block itself, and by a download
    missing = [word for word in named if not word.startswith(made) and not (ROOT / word).exists()]
    return f"no file {missing}" if missing else ""


def check_locust(words: list[str]) -> str:
    """The file exists, and has the class of users if one is named."""
    file, user = ROOT / words[words.index("-f") + 1], next(iter(words[words.index("-f") + 2 :]), "--")
    if not file.exists():
        return f"no file {file}"
    known = user.startswith("--") or re.search(rf"import .*\b{user}\b", file.read_text())
    return "" if known else f"{file.name} has no {user}"


def check_helm(words: list[str]) -> str:
    """The files exist, and the chart has every value that is set."""
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "inflight" / "values.yaml").read_text())
    for word, value in itertools.pairwise(words):
        if word == "--set":
            at = chart
            for key in value.split("=")[0].split("."):
                if not isinstance(at, dict) or key not in at:
                    return f"values.yaml has no {value.split('=')[0]}"
                at = at[key]
    return check_files(words)


CHECKS: dict[str, Callable[[list[str]], str]] = {
    "envoy": check_files,
    "helm": check_helm,
    "inflight": check_inflight,
    "locust": check_locust,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_files,
    "python": check_files,
    "docker": check_files,
}


def test_every_command_is_of_a_known_program() -> None:
    unknown = [f"{block.where}: {words[0]}" for block, words in COMMANDS if words[0] not in snippets.PROGRAMS]
    assert not unknown, "add the program to PROGRAMS in tests/support/snippets.py, with a check, and run it"


def test_every_command_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_ADMIN_KEY", raising=False)
    wrong = []
    for block, words in COMMANDS:
        said = CHECKS.get(words[0], lambda words: "")(words)
        if said:
            wrong.append(f"{block.where}: {' '.join(words)}: {said}")
    assert not wrong


def test_commands_within_sentences_are_valid() -> None:
    """`inflight ...` in backticks names a command that exists, and options that it has."""
    wrong = []
    for page, text in QUOTED:
        if not re.match(r"inflight [a-z]", text):
            continue
        command, rest = command_of(text.split()[1:])
        params = [] if command is None else command.params
        has = {option for param in params for option in (*param.opts, *param.secondary_opts)}
        options = {word.split("=")[0] for word in rest if word.startswith("--")}
        if not params or options - has - {"--help"}:
            wrong.append(f"{page}: `{text}`")
    assert not wrong


def test_other_programs_within_sentences_are_called_rightly() -> None:
    checks = {name: check for name, check in CHECKS.items() if name != "inflight"}
    found = [(page, text) for page, text in QUOTED if text.startswith(tuple(f"{name} " for name in checks))]
    said = [(page, text, checks[words[0]](words)) for page, text in found for words in commands(text)[:1]]
    assert said and not [one for one in said if one[2]]


@pytest.mark.nightly
def test_benchmarks_have_the_options_that_pages_name() -> None:
    found = [(page, words) for page, text in QUOTED if text.startswith("python bench/") for words in commands(text)]
    found += [(block.where, words) for block, words in COMMANDS if words[:1] == ["python"] and "bench/" in words[1]]
    printed: dict[str, str] = {}
    for where, words in found:
        command = " ".join(words[1 : 3 if words[1] == "bench/gpu.py" else 2])
        if command not in printed:
            called = [sys.executable, *command.split(), "--help"]
            ended = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, f"{where}: {ended.stderr}"
            printed[command] = ended.stdout
        own = words[: words.index("--")] if "--" in words else words  # what follows is for another program
        missing = [word for word in own if word.startswith("--") and word not in printed[command]]
        assert not missing, f"{where}: {' '.join(words)}"


def test_curl_sends_json() -> None:
    for block, words in COMMANDS:
        if words[0] == "curl" and "-d" in words:
            assert isinstance(json.loads(words[words.index("-d") + 1]), dict), block.where


def test_every_exception_is_needed() -> None:
    """A reason or a substitution without a line leaves the tables."""
    texts = [line for _, line in LINES] + [block.text for block in of_language("python")]
    unused = [pattern for pattern, _ in snippets.NOT_RUN if not any(re.match(pattern, text) for text in texts)]
    joined = "\n".join(texts)
    unused += [pattern for pattern, _ in snippets.SUBSTITUTIONS if not re.search(pattern, joined)]
    assert not unused


# -- python


def imported(tree: ast.AST) -> list[tuple[str, str]]:
    """(module, name) of each import; the name of `import module` is empty."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("block", of_language("python"), ids=lambda block: block.where)
def test_a_program_compiles_and_its_names_can_be_imported(block: Block) -> None:
    tree = ast.parse(block.text)
    for module, name in imported(tree):
        if module.split(".")[0] in snippets.MODULES_ELSEWHERE:
            continue
        assert importlib.util.find_spec(module), f"{block.where}: no module {module}"
        if name:
            found = importlib.import_module(module)
            # `hasattr` would load torch for inflight's LLM.
            has = name in getattr(found, "__all__", ()) or hasattr(found, name)
            assert has, f"{block.where}: {module} has no {name}"


# -- json, yaml, pbtxt


@pytest.mark.parametrize("block", of_language("json"), ids=lambda block: block.where)
def test_json_is_valid(block: Block) -> None:
    found = json.loads(block.text)
    if block.title == "model.json":
        EngineConfig.from_dict(found)


def test_values_are_the_charts() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "inflight" / "values.yaml").read_text())
    for block in of_language("yaml"):
        unknown = {*yaml.safe_load(block.text)} - {*chart}
        assert not unknown, f"{block.where}: values.yaml has no {unknown}"


@pytest.mark.parametrize("block", of_language("pbtxt"), ids=lambda block: block.where)
def test_a_configuration_is_valid(block: Block) -> None:
    text_format.Parse(block.text, model_config_pb2.ModelConfig())


# -- the checks themselves


@pytest.mark.parametrize(
    "line",
    [
        "inflight status --mode demo",
        "inflight stats",
        "make teste",
        "pip install '.[backends]'",
        "python bench/no_such_file.py",
        "locust -f loadtest/locustfile.py NoUser",
        "helm install llm deploy/helm/inflight --set gatewy.replicas=2",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = commands(line)
    assert CHECKS[words[0]](words)


def test_lines_and_commands_of_a_script() -> None:
    text = "# a comment\na=1 inflight status \\\n    --json | jq .state > x.json  # why\n\ncp a b && echo 'c # d'\n"
    lines = logical_lines(text)
    assert lines == ["a=1 inflight status --json | jq .state > x.json  # why", "cp a b && echo 'c # d'"]
    assert [commands(line) for line in lines] == [
        [["inflight", "status", "--json"], ["jq", ".state"]],
        [["cp", "a", "b"], ["echo", "c # d"]],
    ]


def test_blocks_of_a_page() -> None:
    text = """# a

```json title="model.json"
{}
```

1. b

   ~~~sh
   make run
   ~~~

c

    d e

```
f
```
"""
    assert [(block.where, block.language, block.title, block.text) for block in snippets.blocks_of(text, "p")] == [
        ("p:3", "json", "model.json", "{}\n"),
        ("p:9", "sh", "", "make run\n"),
        ("p:15", "", "", "d e\n"),
        ("p:17", "", "", "f\n"),
    ]
