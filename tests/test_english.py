"""Code and docs avoid the phrases in english.yaml; english_counts.json has how many each folder may still contain.

python tests/test_english.py            write the present counts, which may only fall
python tests/test_english.py bench      show the places in a folder, with what to write instead
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RULES_FILE = Path(__file__).with_name("english.yaml")
COUNTS_FILE = Path(__file__).with_name("english_counts.json")
SUFFIXES = (".py", ".md", ".cpp", ".h")
# Recorded results, history, and this file.
LEFT_OUT = ("bench/results/", "loadtest/results/", "CHANGELOG.md", "tests/test_english.py")


@dataclass
class Rule:
    """A phrase to avoid; english.yaml describes the fields."""

    name: str
    words: list[str]
    pattern: str
    why: str
    instead: str
    exact: bool = False
    before: str = ""

    def matches(self, text: str, lowered: str) -> Iterator[int]:
        """Where the phrase begins in a text, which is also given in lower case."""
        if any(word in lowered for word in self.words):
            searched = text if self.exact else lowered
            for match in re.finditer(self.pattern, searched, re.MULTILINE):
                begins = searched.rfind("\n", 0, match.start()) + 1
                if re.search(self.before, searched[begins : match.start()]):
                    yield match.start()


def text_of(path: str, text: str) -> str:
    """The text of a file in which phrases are searched, with the line numbers of the file.

    Of a page without code, quoted names, and headings that ask a question.
    """
    if not path.endswith(".md"):
        return text
    text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^#+ What .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", text)


def find(rules: list[Rule], text: str) -> list[tuple[Rule, int]]:
    """Each phrase in a text, with its line, counted from 1."""
    lowered = text.lower()
    return [(rule, text.count("\n", 0, start) + 1) for rule in rules for start in rule.matches(text, lowered)]


def rules() -> list[Rule]:
    return [Rule(**entry) for entry in yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))]


@cache
def places() -> dict[str, list[tuple[Rule, str, int]]]:
    """By top-level folder ("." for files outside of any): rule, path and line of each phrase."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    known = rules()
    found: dict[str, list[tuple[Rule, str, int]]] = {}
    for path in listed.stdout.splitlines():
        if not path.endswith(SUFFIXES) or path.startswith(LEFT_OUT) or not (ROOT / path).is_file():
            continue
        folder = path.partition("/")[0] if "/" in path else "."
        text = text_of(path, (ROOT / path).read_text(encoding="utf-8"))
        found.setdefault(folder, []).extend((rule, path, line) for rule, line in find(known, text))
    return found


def counts() -> dict[str, dict[str, int]]:
    """By folder and name of the rule: how many phrases there are."""
    found = {folder: Counter(rule.name for rule, _, _ in there) for folder, there in places().items()}
    return {folder: dict(sorted(there.items())) for folder, there in sorted(found.items()) if there}


def test_no_folder_has_more_crooked_phrases_than_it_had() -> None:
    allowed = json.loads(COUNTS_FILE.read_text(encoding="utf-8"))
    too_many = [
        f"{folder}: {number} times '{name}', at most {allowed.get(folder, {}).get(name, 0)}; see "
        f"python tests/test_english.py {folder}"
        for folder, there in counts().items()
        for name, number in there.items()
        if number > allowed.get(folder, {}).get(name, 0)
    ]
    assert not too_many


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Whoever comes first.", ["whoever"]),
        ("Tokens, of\nwhich two are new; those that wait in vain.", ["in vain", "of which", "those that"]),
        ('"""What a step costs."""', ["what-clause"]),
        ("It ends. What is late fails.", ["what-clause"]),
        ("What is late? It fails.", []),
        ("a standard, stand-alone tool that stands for itself", []),
        ("The header stands in front, and nobody knows whose turn it is.", ["nobody", "stands", "whose it is"]),
        ("in whatever order; whatever dies", ["whatever"]),
        ("indoor, outstanding, in vainglory", []),
    ],
)
def test_phrases_are_found(text: str, names: list[str]) -> None:
    assert sorted(rule.name for rule, _ in find(rules(), text)) == names


def test_code_in_a_page_is_not_prose() -> None:
    page = "# What it is\n\n```\nnobody\n```\n\n`whoever` and nobody.\n"
    assert [(rule.name, line) for rule, line in find(rules(), text_of("a.md", page))] == [("nobody", 7)]


def main(folders: list[str]) -> None:
    for folder in folders:
        for rule, path, line in sorted(places().get(folder, []), key=lambda place: place[1:]):
            print(f"{path}:{line}: {rule.name} ({rule.why}). {rule.instead}")
    if not folders:
        COUNTS_FILE.write_text(json.dumps(counts(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
