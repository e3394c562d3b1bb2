"""The page for browsers: its files, its state of the server, and who gets what."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_client import ScriptedClient, stats, text

from inflight_client import DeadlineExceededError, InvalidRequestError, ServerUnreachableError, UnavailableError
from inflight_gateway.health import package_version
from inflight_gateway.options import GatewayOptions
from inflight_gateway.page import files
from inflight_gateway.replicas import Replicas
from inflight_gateway.upstream import Upstream

STATIC = Path(files.__file__).parent / "static"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
KEY = {"Authorization": "Bearer key"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
TWO = ("10.0.0.1:8001", "10.0.0.2:8001")


def ok(request):
    return text("a")


# -- the files -----------------------------------------------------------------------------------------


async def test_browsers_get_the_page_and_other_clients_a_line(start):
    front = await start(ok, api_keys=("key",))
    page = await front.http.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.text == SOURCES["index.html"]
    assert page.headers["content-type"] == "text/html; charset=utf-8" and page.headers["vary"] == "Accept"
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        line = await front.http.get("/", headers=headers)
        assert line.text == "Inflight is running" and line.headers["vary"] == "Accept"
    assert (await front.http.head("/", headers=BROWSER)).headers["etag"] == page.headers["etag"]


async def test_every_file_is_sent_without_a_key_and_only_once(start):
    front = await start(ok, api_keys=("key",))
    for path in ("/", "/docs", *(f"/page/{name}" for name in SOURCES if not name.endswith(".html"))):
        first = await front.http.get(path, headers=BROWSER)
        assert first.status_code == 200 and first.headers["x-content-type-options"] == "nosniff", path
        for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
            again = await front.http.get(path, headers={**BROWSER, "If-None-Match": known})
            assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == first.headers["etag"]
        changed = await front.http.get(path, headers={**BROWSER, "If-None-Match": '"other"'})
        assert changed.status_code == 200 and changed.content == first.content
        policy = dict(part.split(" ", 1) for part in first.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and set(policy.values()) == {"'none'", "'self'", "'script'"}
        assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"


@pytest.mark.parametrize("name", ["index.html", "docs.html", "nothing.js", "..%2fstatus.py", "../files.py"])
async def test_no_other_file_is_sent(start, name):
    front = await start(ok)
    answer = await front.http.get(f"{front.url}/page/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    keyed = await start(ok, api_keys=("key",))
    assert (await keyed.http.get(f"{keyed.url}/page/{name}")).status_code == 401


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_comes_from_elsewhere_and_no_text_becomes_html(name):
    source = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://[a-z0-9]", source), "a foreign address"
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|setHTML|srcdoc"
    assert not re.search(unsafe, source)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=[\"']", source), (
        "inline, which the policy forbids"
    )


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name.endswith(".js")))
def test_scripts_find_their_modules_and_elements(name):
    for imported in re.findall(r'from "\./([^"]+)"', SOURCES[name]):
        assert imported in SOURCES
    ids = set(re.findall(r'byId\("([\w-]+)"\)', SOURCES[name]))
    assert ids <= set(re.findall(r'id="([\w-]+)"', SOURCES["docs.html" if name == "docs.js" else "index.html"]))


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
def test_every_field_has_a_label(name):
    page = SOURCES[name]
    fields = re.findall(r'<(?:input|select|textarea) id="([\w-]+)"', page)
    assert fields and set(fields) <= set(re.findall(r'<label for="([\w-]+)"', page))
    assert '<html lang="en">' in page and 'name="viewport"' in page


async def test_the_docs_need_no_key_but_the_document_does(start):
    front = await start(ok, api_keys=("key",))
    assert "page/docs.js" in (await front.http.get("/docs")).text
    assert (await front.http.get("/openapi.json")).status_code == 401
    document = (await front.http.get("/openapi.json", headers=KEY)).json()
    assert {"/", "/page/status"} <= document["paths"].keys()


async def test_the_page_can_be_turned_off(start):
    front = await start(ok, api_keys=("key",), page=False)
    assert (await front.http.get("/", headers=BROWSER)).text == "Inflight is running"
    for path in ("/docs", "/page/main.js", "/page/status"):
        assert (await front.http.get(path)).status_code == 401
    refused = await front.http.get("/page/status", headers=KEY)
    assert refused.status_code == 404 and "--no-page" in refused.json()["error"]["message"]
    assert (await front.http.get("/page/main.js", headers=KEY)).status_code == 404
    docs = (await front.http.get("/docs", headers=KEY)).text
    assert "/v1/chat/completions" in docs and "<script" not in docs
    assert not front.client.admin_keys


async def test_a_foreign_name_gets_no_page(start):
    front = await start(ok, allowed_hosts=("localhost",))
    for path in ("/", "/docs", "/page/main.js", "/page/status"):
        assert (await front.http.get(path, headers={**BROWSER, "Host": "evil.example"})).status_code == 403


def test_the_version_is_that_of_the_installed_distribution(monkeypatch):
    asked = []
    monkeypatch.setattr("inflight_gateway.health.installed_version", lambda name: asked.append(name) or "1.2.3")
    assert package_version() == "1.2.3"
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'name = "{asked[0]}"' in pyproject


# -- the state -----------------------------------------------------------------------------------------


async def status(front: Any) -> dict[str, Any]:
    answer = await front.http.get("/page/status", headers=KEY)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store", answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_state_has_models_and_load(start):
    client = ScriptedClient(ok, ["demo", "other"])
    client.stats = stats(generation_tokens=77)
    front = await start(client, admin_key="admin", triton=("a:1",), api_keys=("key",))
    assert (await front.http.get("/page/status")).status_code == 401
    found = await status(front)
    assert found["models"][0] == {"id": "demo", "max_model_len": 2048, "reasoning": False}
    assert found["open_requests"] == 0 and found["routing"] == "ordered" and found["problem"] is None
    (triton,) = found["tritons"]
    assert triton["address"] == "a:1" and triton["up"]
    assert [one["model"] for one in triton["models"]] == ["demo", "other"]
    assert triton["models"][0] == {
        "model": "demo",
        "state": "ready",
        "reason": None,
        "instance": "demo_0_0",
        "running": 3,
        "waiting": 1,
        "kv_blocks_used": 120,
        "kv_blocks": 512,
        "prefix_queries": 1000,
        "prefix_hits": 620,
        "generation_tokens": 77,
    }
    assert client.admin_keys == ["admin", "admin"]


async def test_the_docs_show_the_keys_of_the_state(start):
    page = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")
    shown = json.loads(page.split('```json title="response"\n')[1].split("```")[0])

    def keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: keys(one) for name, one in value.items()}
        return [keys(one) for one in value] if isinstance(value, list) else None

    assert keys(shown) == keys(await status(await start(ok, triton=("a:1",))))


async def test_the_pages_own_request_is_strict(start):
    """With all settings, as the page's settings.js makes it."""
    client = ScriptedClient(ok)
    client.info.update(reasoning_tags=["<think>", "</think>"], tool_format="hermes")
    front = await start(client, strict=True)
    body = {
        "model": "demo",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 5,
        "think": True,
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "b"},
        ],
    }
    answer = await front.post("/v1/chat/completions", body)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    assert "x-inflight-warning" not in answer.headers


async def test_neither_paths_nor_processes_nor_tenants_nor_keys_are_shown(start):
    front = await start(ok, admin_key="admin-secret", api_keys=("key",))
    shown = (await front.http.get("/page/status", headers=KEY)).text
    for secret in ("/secret/path", "secret-tenant", "4711", "4712", "admin-secret"):
        assert secret not in shown


async def test_one_of_several_is_down(start):
    gone, breaks = ScriptedClient(ok), ScriptedClient(ok)
    gone.is_live = False
    breaks.stats = ServerUnreachableError("lost the connection")
    triton = (*TWO, "10.0.0.3:8001")
    front = await start(ok, replicas={TWO[1]: gone, triton[2]: breaks}, triton=triton)
    found = await status(front)
    assert [(one["address"], one["up"], len(one["models"])) for one in found["tritons"]] == [
        (TWO[0], True, 1),
        (TWO[1], False, 0),
        (triton[2], False, 0),
    ]


@pytest.mark.parametrize(
    ("answer", "is_ready", "state", "says"),
    [
        (stats(engine=False, state="restarting", reason="it is restarted"), True, "restarting", "restarted"),
        (DeadlineExceededError("no answer"), True, "unresponsive", "no answer within 2 s"),
        (InvalidRequestError("unknown model", code="NOT_FOUND"), False, "not loaded", None),
        (UnavailableError("Stub process is not healthy"), True, "unresponsive", "not healthy"),
        (UnavailableError("the model is not ready"), False, "not loaded", None),
        (InvalidRequestError("control='stats': the admin key is missing"), True, "ready", "INFLIGHT_ADMIN_KEY"),
        ({"state": "ready"}, True, "ready", "its load is unknown"),
    ],
)  # fmt: skip
async def test_a_model_without_numbers_says_why(start, answer, is_ready, state, says):
    client = ScriptedClient(ok)
    client.stats, client.is_ready = answer, is_ready
    (model,) = (await status(await start(client, triton=("a:1",))))["tritons"][0]["models"]
    assert model["state"] == state and model["running"] is None and model["kv_blocks"] is None
    assert (says is None and model["reason"] is None) or says in model["reason"]


async def test_an_older_server_tells_no_tokens(start):
    client = ScriptedClient(ok)
    client.stats = stats()
    del client.stats["frontend"]["generation_tokens"]
    (model,) = (await status(await start(client, triton=("a:1",))))["tritons"][0]["models"]
    assert model["generation_tokens"] is None and model["running"] == 3


async def test_a_model_of_another_backend_is_not_asked(start):
    client = ScriptedClient(ok)
    client.inputs["demo"] = ("text_input", "stream", "sampling_parameters")
    (model,) = (await status(await start(client, triton=("a:1",))))["tritons"][0]["models"]
    assert (model["state"], model["reason"], model["running"]) == ("ready", None, None)
    assert not client.admin_keys


async def test_without_a_model_the_page_says_why(start):
    class Unreachable(ScriptedClient):
        async def repository_index(self):
            raise ServerUnreachableError("cannot reach 127.0.0.1:1 by gRPC")

    client = Unreachable(ok)
    client.is_live = False
    found = await status(await start(client))
    assert found["models"] == [] and "cannot reach" in found["problem"]
    assert [one["up"] for one in found["tritons"]] == [False]
    none_loaded = await status(await start(ScriptedClient(ok, [])))
    assert none_loaded["models"] == [] and none_loaded["problem"] is None and none_loaded["tritons"][0]["up"]


async def test_readers_share_one_question():
    options = GatewayOptions(triton=("a:1",))
    client, now = ScriptedClient(ok), [100.0]
    replicas = Replicas(options, Upstream(options, client), lambda address: client, lambda: now[0])
    fleets = await asyncio.gather(*[replicas.fleet() for _ in range(20)])
    assert len(client.admin_keys) == 1 and all(one is fleets[0] for one in fleets)
    now[0] += 0.75
    await replicas.fleet()
    assert len(client.admin_keys) == 1
    now[0] += 0.5
    assert (await replicas.fleet()).time == 101.25 and len(client.admin_keys) == 2
