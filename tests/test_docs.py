"""Links between the pages and paths named in them lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

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
    page = (ROOT / "docs" / "operations" / "configure.md").read_text(encoding="utf-8")
    section = page.split("\n## All keys\n")[1].split("\n## ")[0]
    keys = [key for row in section.splitlines()[3:] for key in re.findall(r"`(\w+)`", row.split(" | ")[1])]
    assert sorted(keys) == sorted(EngineConfig.__struct_fields__)


def test_the_page_on_gpus_lists_every_switch_once() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    section = page.split("\n## Switches\n")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)` \|", section) == list(KernelConfig.__struct_fields__)
