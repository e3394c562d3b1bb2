"""Links between the pages and paths named in them lead somewhere, reference pages are current, and the site builds."""

from __future__ import annotations

import importlib.util
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from inflight.config import EngineConfig
from inflight.kernel_config import KernelConfig

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        path
        for folder in ("bench", "deploy", "model_repository")
        for path in sorted((ROOT / folder).rglob("README.md"))
    ),
]
# Pages that name files in backticks, relative to one of these folders.
NAMING_PAGES = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = [ROOT, ROOT / "backend" / "inflight"]

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def program(name: str) -> ModuleType:
    """A program of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_resolve() -> None:
    for page in PAGES:
        broken = []
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)
        assert not broken, f"links of {page.relative_to(ROOT)} that lead nowhere"


def test_named_files_exist() -> None:
    for page in NAMING_PAGES:
        named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|cpp|h|md|json|toml)|[\w.-]+/(?:[\w.-]+/)*)`", prose(page)))
        missing = {name for name in named if not any((folder / name).exists() for folder in FOLDERS)}
        assert not missing, f"{page.relative_to(ROOT)} names files that do not exist"


def test_the_page_on_options_lists_every_key_once() -> None:
    keys = [key for _, keys in program("generate_reference").topics() for key in keys]
    assert sorted(keys) == sorted(EngineConfig.__struct_fields__)


def test_the_page_on_gpus_lists_every_switch_once() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    section = page.split("\n## Switches\n")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)` \|", section) == list(KernelConfig.__struct_fields__)


# -- reference pages


def test_the_reference_pages_are_current() -> None:
    for path, text in program("generate_reference").pages().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.relative_to(ROOT)} is out of date: python docs/generate_reference.py"
        )


def test_every_key_is_described_once() -> None:
    generator = program("generate_reference")
    for struct in (EngineConfig, *generator.nested(EngineConfig)):
        assert sorted(generator.descriptions(struct)) == sorted(struct.__struct_fields__), struct.__name__


class Inner(msgspec.Struct):
    """Of a list.

    Attributes:
        x: a number.
    """

    x: int = 1


class Options(msgspec.Struct):
    """Options.

    Attributes:
        first, second: see docs/tracing.md;
            `None` means none.
        third: an object.
    """

    first: msgspec.Raw | None = None
    second: bool = False
    third: Inner | None = None


def test_an_entry_has_type_limits_default_and_links() -> None:
    generator = program("generate_reference")
    assert generator.entry(Options, "second", "###") == (
        "### `second`\n\nboolean; default: `false`\n\nSee [tracing.md](../tracing.md); `null` means none.\n"
    )
    assert "[Inner](#inner) or null; default: `null`" in generator.entry(Options, "third", "###")
    assert [*generator.nested(Options)] == [Inner]


# -- the site


def test_every_page_is_in_the_menu() -> None:
    listed = re.findall(r"(?m)^ +- (?:[\w ]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text())
    pages = [str(page.relative_to(ROOT / "docs")) for page in NAMING_PAGES]
    assert sorted(listed) == sorted(pages), "nav in mkdocs.yml"


class Page(HTMLParser):
    """Links, ids, and files that the browser loads, of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids.add(values.get("id", ""))
        if tag == "a":
            self.links.append(values.get("href", ""))
        elif tag in ("script", "img", "link"):
            self.loaded.append(values.get("src") or values.get("href", ""))


def is_remote(link: str) -> bool:
    return re.match(r"[a-z]+:|//", link) is not None and not link.startswith("data:")


@pytest.mark.nightly
def test_the_site_builds_without_warnings_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    # `strict` makes warnings errors: pages that are in no menu, links and anchors that lead nowhere.
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path), repo_url="https://example.org/r"))
    found = {path: Page(path) for path in tmp_path.rglob("*.html")}
    assert len(found) > len(NAMING_PAGES), "and a page for addresses that do not exist"
    for path, page in found.items():
        assert not [link for link in page.loaded if is_remote(link)], f"{path} loads files of other servers"
        if path.name == "404.html":
            continue  # its links are absolute
        for link in page.links:
            if not link or is_remote(link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path}: {link}"
            assert not anchor or target.suffix != ".html" or anchor in found[target].ids, f"{path}: {link}"
    text = (tmp_path / "operations" / "serve.html").read_text()
    assert 'href="https://example.org/r/blob/main/compose.yaml"' in text


def test_links_out_of_the_docs_lead_to_the_repository(caplog: pytest.LogCaptureFixture) -> None:
    hooks = program("site_hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="operations/serve.md"))
    text = "[a](../../compose.yaml) [b](../gpu.md#x)\n\n```text\n[c](../../compose.yaml)\n```\n"

    def shown(repository: str | None, text: str = text) -> str:
        config = {"docs_dir": str(ROOT / "docs"), "repo_url": repository}
        return hooks.on_page_markdown(text, page, config, None)

    assert shown("https://example.org/r/").startswith(
        "[a](https://example.org/r/blob/main/compose.yaml) [b](../gpu.md#x)"
    )
    assert shown("https://example.org/r").endswith("[c](../../compose.yaml)\n```\n")
    assert shown(None).startswith("a (`compose.yaml`) [b](../gpu.md#x)")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        shown(None, "[a](../../no_such_file.py)")
    assert "operations/serve.md: ../../no_such_file.py does not exist" in caplog.text
