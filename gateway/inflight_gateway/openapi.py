"""`/openapi.json` and `/docs`, generated from the types of the request bodies."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from inflight_gateway.bodies import Body
from inflight_gateway.gateway import gateway_of
from inflight_gateway.health import package_version
from inflight_gateway.page.files import docs_page
from inflight_gateway.sse import encode_json

__all__ = ["ApiPages"]

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class ApiPages:
    """Both, generated once.

    Args:
        endpoints: (method, path) -> (summary, types that the body can have).
    """

    def __init__(self, endpoints: Mapping[tuple[str, str], tuple[str, Sequence[type[Body]]]]) -> None:
        kinds = list(dict.fromkeys(kind for _, kinds in endpoints.values() for kind in kinds))
        _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        paths: dict[str, dict[str, Any]] = {}
        for (method, path), (summary, bodies) in endpoints.items():
            paths.setdefault(path, {})[method.lower()] = _operation(path, summary, bodies)
        document = {
            "openapi": "3.1.0",
            "info": {"title": "Inflight: OpenAI's API in front of Triton", "version": package_version()},
            "paths": paths,
            "components": {
                "schemas": {**components, "Error": _ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
        self._document = encode_json(document)
        rows = [
            f"<tr><td>{method}</td><td><code>{html.escape(path)}</code></td><td>{html.escape(summary)}</td></tr>"
            for (method, path), (summary, _) in endpoints.items()
        ]
        table = f"<table>{''.join(rows)}</table>"
        self._bare = (
            "<!doctype html><html lang=en><meta charset=utf-8><title>Inflight: OpenAI's API</title>"
            f"<h1>OpenAI's API in front of Triton</h1>{table}"
            "<p>All keys of the bodies: <a href=openapi.json>openapi.json</a></p></html>"
        )
        self._browsable = docs_page(table)

    async def document(self, http: Request) -> Response:
        """`/openapi.json`."""
        return Response(self._document, media_type="application/json")

    async def page(self, http: Request) -> Response:
        """`/docs`: it needs no key if it is a page for browsers, which asks for the document with one."""
        if gateway_of(http).options.page:
            return self._browsable.answer(http)
        return HTMLResponse(self._bare)


def _operation(path: str, summary: str, bodies: Sequence[type[Body]]) -> dict[str, Any]:
    failure = {"description": "An error", "content": {"application/json": {"schema": _ref("Error")}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer"}, "default": failure},
    }
    if bodies:
        schemas = [_ref(kind.__name__) for kind in bodies]
        content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
