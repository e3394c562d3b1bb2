"""Hooks of mkdocs.yml: links that leave docs/ lead to the repository.

Pages link to files of the repository by relative paths (`../backend/inflight/config.py`), as the repository's host
shows them.  The site has no such files, so these links become addresses of the repository; a site without `repo_url`
shows the path instead.  A path that does not exist is a warning, which `mkdocs build --strict` takes for an error.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.site_hooks")

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links of the site, or of the repository; code is left as it is."""
    docs = Path(config["docs_dir"])
    source = docs / page.file.src_uri

    def rewritten(match: re.Match[str]) -> str:
        text, (path, _, anchor) = match[1], match[2].partition("#")
        target = (source.parent / path).resolve()
        if target.is_relative_to(docs):
            return match[0]  # mkdocs checks it
        if not target.exists():
            LOG.warning(f"{page.file.src_uri}: {match[2]} does not exist")
        return repository_link(text, target.relative_to(docs.parent), anchor, config["repo_url"])

    parts = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewritten, markdown[end:])])


def repository_link(text: str, path: Path, anchor: str, repository: str | None) -> str:
    if not repository:
        return text if str(path) in text else f"{text} (`{path}`)"
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{'#' + anchor if anchor else ''})"
