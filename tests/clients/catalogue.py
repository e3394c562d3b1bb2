"""The clients of this folder: where each runs, the versions of its packages, and what its tests cover."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

KEY = "key-of-the-test"  # that the gateway asks for
ADAPTER = "doll"  # of the model
HERE = Path(__file__).parent
NODE = HERE / "node"
ENVIRONMENTS = Path(os.environ.get("INFLIGHT_CLIENTS_ENV", HERE.parents[1] / ".venv-clients"))


@dataclass(frozen=True)
class Client:
    """One row of docs/clients.md.

    Attributes:
        name: as in the page.
        file: its tests, below this folder.
        packages: whose versions the page gives; the first is the client itself.
        environment: "openai2" or "openai3", of environments.sh; "node".
    """

    name: str
    file: str
    packages: tuple[str, ...]
    environment: str

    @property
    def missing(self) -> str | None:
        """The environment that this machine lacks; None if there is one."""
        found = NODE / "node_modules" if self.environment == "node" else ENVIRONMENTS / self.environment / "bin"
        return None if found.exists() else f"{self.name}: no {found}; make clients-env (with Node for JavaScript)"

    def command(self, report: Path) -> Sequence[str]:
        """Runs its tests, and writes JUnit's XML."""
        path = str(HERE / self.file)
        if self.environment == "node":
            to_terminal = ["--test-reporter=spec", "--test-reporter-destination=stdout"]
            to_file = ["--test-reporter=junit", f"--test-reporter-destination={report}"]
            return ["node", "--test", *to_terminal, *to_file, path]
        python = str(ENVIRONMENTS / self.environment / "bin" / "python")
        return [python, "-m", "pytest", "-c", str(HERE / "python" / "pytest.ini"), f"--junitxml={report}", path]

    def versions(self) -> list[str]:
        """Of its packages, from the locks."""
        return [_locked(self.environment)[package] for package in self.packages]

    def features(self) -> set[str]:
        """Groups of its tests, in the words of the page's columns."""
        text = (HERE / self.file).read_text()
        if self.environment == "node":
            return set(re.findall(r"(?m)^describe\('([\w ]+)'", text))
        return {_words(name) for name in re.findall(r"(?m)^class Test(\w+):", text)}


CLIENTS = (
    Client("openai-python", "python/openai_python.py", ("openai",), "openai3"),
    Client("openai-python 2", "python/openai_python.py", ("openai",), "openai2"),
    Client("openai-node", "node/openai_node.mjs", ("openai",), "node"),
    Client("anthropic", "python/anthropic_client.py", ("anthropic",), "openai3"),
    Client("ollama", "python/ollama_client.py", ("ollama",), "openai3"),
    Client("LangChain", "python/langchain_client.py", ("langchain-openai", "langchain", "langchain-cohere"), "openai3"),
    Client("cohere", "python/cohere_client.py", ("cohere",), "openai3"),
    Client("pydantic-ai", "python/pydantic_ai_client.py", ("pydantic-ai-slim",), "openai3"),
    Client("instructor", "python/instructor_client.py", ("instructor",), "openai2"),
    Client("LiteLLM", "python/litellm_client.py", ("litellm",), "openai2"),
    Client("DSPy", "python/dspy_client.py", ("dspy",), "openai2"),
    Client("LlamaIndex", "python/llama_index_client.py", ("llama-index-llms-openai-like",), "openai2"),
    Client("Haystack", "python/haystack_client.py", ("haystack-ai",), "openai3"),
    Client("Vercel's AI SDK", "node/ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible"), "node"),
)


def outcomes(report: Path) -> Mapping[str, list[str]]:
    """Failed tests of each group, from JUnit's XML of pytest or of Node."""
    found: dict[str, list[str]] = {}

    def take(case: ElementTree.Element, group: str) -> None:
        failed = [] if case.find("failure") is None and case.find("error") is None else [case.get("name", "")]
        found.setdefault(group, []).extend(failed)

    root = ElementTree.parse(report).getroot()
    for suite in root.iter("testsuite"):
        for case in suite.findall("testcase"):
            cls = re.search(r"\bTest(\w+)$", case.get("classname", ""))
            take(case, _words(cls[1]) if cls else suite.get("name", ""))
    return found


def _words(name: str) -> str:
    """`StructuredOutput` -> "structured output"."""
    words = re.findall(r"[A-Z][a-z]+", name)
    return " ".join(words).lower()


def _locked(environment: str) -> dict[str, str]:
    if environment == "node":
        packages = json.loads((NODE / "package-lock.json").read_text())["packages"]
        return {name.removeprefix("node_modules/"): entry["version"] for name, entry in packages.items() if name}
    # The last of several versions for several versions of Python is for the newest ones.
    lines = (HERE / "python" / f"{environment}.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", line)[0] for line in lines if "==" in line)
