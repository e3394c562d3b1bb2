"""The files of the page: HTML, JavaScript and CSS of our own, in `static/`.  They contain no data and need no key."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from inflight_gateway.gateway import gateway_of

__all__ = ["OPEN_PATHS", "StaticFile", "docs_page", "front_page", "page_file"]

_FOLDER = Path(__file__).parent / "static"
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing comes from elsewhere, nothing is sent elsewhere, and no script can turn a text into HTML.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
_TABLE = "<!-- table of endpoints -->"  # its place in docs.html


class StaticFile:
    """A file that is sent once, and then only if it has changed.

    Args:
        content: of the file.
        suffix: of its name.
    """

    def __init__(self, content: bytes, suffix: str) -> None:
        self._content = content
        self._headers = {
            "Content-Type": _KINDS[suffix],
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-cache",  # ask each time whether it has changed
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }

    def answer(self, http: Request, **headers: str) -> Response:
        """The file, or 304 if the browser has it."""
        known = {tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")}
        all_headers = {**self._headers, **headers}
        if self._headers["ETag"] in known:
            return Response(status_code=304, headers=all_headers)
        return Response(self._content, headers=all_headers)


def _read(name: str) -> StaticFile:
    path = _FOLDER / name
    return StaticFile(path.read_bytes(), path.suffix)


_FRONT = _read("index.html")
_FILES = {path.name: _read(path.name) for path in sorted(_FOLDER.iterdir()) if path.suffix in (".css", ".js", ".svg")}

OPEN_PATHS = ("/docs", *(f"/page/{name}" for name in _FILES))  # answered without a key


def docs_page(table: str) -> StaticFile:
    """The page at `/docs`; `table`: of the endpoints, in HTML, for browsers without scripts."""
    text = (_FOLDER / "docs.html").read_text(encoding="utf-8")
    assert _TABLE in text
    return StaticFile(text.replace(_TABLE, table).encode(), ".html")


async def front_page(http: Request) -> Response:
    """`/`: the page for browsers; a line of text for clients that look for a server, as Ollama's do."""
    vary = {"Vary": "Accept"}
    if gateway_of(http).options.page and "text/html" in http.headers.get("accept", ""):
        return _FRONT.answer(http, **vary)
    return PlainTextResponse("Inflight is running", headers=vary)


async def page_file(http: Request) -> Response:
    """`/page/NAME`."""
    file = _FILES.get(http.path_params["name"])
    if file is None or not gateway_of(http).options.page:
        raise HTTPException(404)
    return file.answer(http)
