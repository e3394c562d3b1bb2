"""docs/clients.md says of each client what its tests cover, and the versions that they run with."""

from __future__ import annotations

import re

import pytest

from tests.clients.catalogue import CLIENTS, HERE, Client

PAGE = (HERE.parents[1] / "docs" / "clients.md").read_text(encoding="utf-8")


def table() -> tuple[list[str], dict[str, list[str]]]:
    """Columns, and the cells of each client."""
    section = PAGE.split("\n## What works\n\n")[1].split("\n\n")[0]
    header, _, *rows = re.findall(r"(?m)^\|(.+)\|$", section)
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    return [column.strip() for column in header.split(" | ")], {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_row_has_the_tests_and_the_versions_of_its_client(client: Client) -> None:
    (_, _, *features), rows = table()
    versions, *cells = rows[client.name]
    assert re.findall(r"\d[\w.]*", versions) == client.versions()
    assert set(cells) <= {"yes", ""} and len(cells) == len(features)
    assert {feature for feature, cell in zip(features, cells) if cell == "yes"} == client.features()


def test_every_row_is_of_a_client() -> None:
    assert list(table()[1]) == [client.name for client in CLIENTS]


def test_every_file_of_tests_is_run() -> None:
    files = {path.relative_to(HERE).as_posix() for folder in ("python", "node") for path in (HERE / folder).glob("*.*")}
    others = {"python/asked.py", "python/pytest.ini", "node/asked.mjs"}
    tests = {file for file in files if file.endswith((".py", ".mjs"))} - others
    assert tests == {client.file for client in CLIENTS}
