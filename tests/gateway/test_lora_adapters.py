"""Adapters behind the gateway: names of models, loads with the admin key, and nothing without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_client import ScriptedClient, text, vectors

from inflight_client import InvalidRequestError, UnavailableError
from inflight_client.request import GenerationRequest
from inflight_gateway import upstream as upstream_module

KEY = {"inflight-admin-key": "the-admin-key-0123"}
NAMES = {"doll": "a" * 32, "sheep": "b" * 32}


def answer(request: GenerationRequest) -> Any:
    if request.pooling is not None:
        return vectors(request)
    return text(f"by {request.adapter}")


def scripted(models: tuple[str, ...] = ("demo",), adapters: dict[str, str] | None = NAMES) -> ScriptedClient:
    client = ScriptedClient(answer, models)
    client.info = {**client.info, "pooling_tasks": ["embed", "score"], "adapters": adapters and dict(adapters)}
    return client


@pytest.fixture(autouse=True)
def asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "_LIST_SECONDS", -1.0)


async def test_models_lists_adapters_behind_their_model(start: Callable[..., Any]) -> None:
    gateway = await start(scripted())
    cards = (await gateway.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("demo", "demo", None),
        ("doll", "doll", "demo"),
        ("sheep", "sheep", "demo"),
    ]
    card = (await gateway.http.get("/v1/models/sheep")).json()
    assert (card["id"], card["parent"], card["max_model_len"]) == ("sheep", "demo", 2048)


MESSAGES = [{"role": "user", "content": "a"}]
BODIES = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ("/api/generate", {"prompt": "a", "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_endpoint_takes_an_adapter_as_the_model(
    start: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    gateway = await start(scripted())
    for model, adapter in (("sheep", "sheep"), ("demo", None), ("demo/doll", "doll")):
        response = await gateway.post(path, {**body, "model": model})
        assert response.status_code == 200, response.text
        sent = gateway.client.requests[-1]
        assert (sent.model, sent.adapter) == ("demo", adapter)
        if "model" in response.json():
            assert response.json()["model"] == model


async def test_an_unknown_adapter_is_an_unknown_model(start: Callable[..., Any]) -> None:
    gateway = await start(scripted())
    response = await gateway.post("/v1/completions", {"model": "bactrian", "prompt": "a"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found" and "models here: demo, doll, sheep" in error["message"]


async def test_an_unknown_model_makes_nothing_of_ten_thousand_adapters(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other streams of the gateway would wait meanwhile."""
    gateway = await start(scripted(adapters={f"tenant-{number}": "a" * 32 for number in range(10_000)}))
    taken, real = [], upstream_module.adapter_ids
    monkeypatch.setattr(
        upstream_module, "adapter_ids", lambda models: (taken.append(one) or one for one in real(models))
    )
    response = await gateway.post("/v1/completions", {"model": "bactrian", "prompt": "a"})
    message = response.json()["error"]["message"]
    assert response.status_code == 404 and message.endswith("tenant-98 and 9901 more") and len(taken) == 100
    assert len((await gateway.http.get("/v1/models")).json()["data"]) == 10_001


async def test_one_that_was_just_unloaded_elsewhere_is_unknown_too(start: Callable[..., Any]) -> None:
    client = scripted()
    said = "LoRA doll is not supported, we currently support ['sheep']"
    client.answer = lambda request: [InvalidRequestError(said)]
    gateway = await start(client)
    response = await gateway.post("/v1/completions", {"model": "doll", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert response.json()["error"]["message"] == said


async def test_names_of_two_models_are_told_apart(start: Callable[..., Any]) -> None:
    gateway = await start(scripted(("demo", "doll")))
    ids = [card["id"] for card in (await gateway.http.get("/v1/models")).json()["data"]]
    assert ids == ["demo", "demo/doll", "demo/sheep", "doll", "doll/doll", "doll/sheep"]
    for model, (name, adapter) in {
        "doll": ("doll", None),
        "demo/doll": ("demo", "doll"),
        "doll/sheep": ("doll", "sheep"),
    }.items():
        assert (await gateway.post("/v1/completions", {"model": model, "prompt": "a"})).status_code == 200
        sent = gateway.client.requests[-1]
        assert (sent.model, sent.adapter) == (name, adapter)
    response = await gateway.post("/v1/completions", {"model": "sheep", "prompt": "a"})
    assert response.status_code == 404 and "demo/sheep" in response.json()["error"]["message"]


async def test_load_and_unload_with_vllms_answers(start: Callable[..., Any]) -> None:
    gateway = await start(scripted(), admin_key=KEY["inflight-admin-key"])
    body = {"lora_name": "new", "lora_path": "/loras/new"}
    response = await gateway.post("/v1/load_lora_adapter", body, headers=KEY)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert gateway.client.changes[-1] == ("load_adapter", {**body, "load_inplace": False})
    assert gateway.client.admin_keys[-1] == KEY["inflight-admin-key"]
    assert (await gateway.post("/v1/completions", {"model": "new", "prompt": "a"})).status_code == 200
    response = await gateway.post("/v1/load_lora_adapter", body, headers=KEY)
    assert response.status_code == 400 and "has already been loaded" in response.json()["error"]["message"]
    response = await gateway.post("/v1/load_lora_adapter", {**body, "load_inplace": True}, headers=KEY)
    assert response.status_code == 200
    response = await gateway.post("/v1/unload_lora_adapter", {"lora_name": "new"}, headers=KEY)
    assert response.text == "Success: LoRA adapter 'new' removed successfully."
    response = await gateway.post("/v1/unload_lora_adapter", {"lora_name": "new"}, headers=KEY)
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The lora adapter 'new' cannot be found."
    assert (await gateway.post("/v1/completions", {"model": "new", "prompt": "a"})).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ("/v1/load_lora_adapter", {"lora_path": "/x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ("/v1/unload_lora_adapter", {}, "'lora_name' needs to be provided to unload a LoRA adapter."),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, "must be the absolute path of a folder"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x\0y"}, "lora_path: '/x\\x00y' contains a NUL"),
        ("/v1/unload_lora_adapter", {"lora_name": "x\0y"}, "lora_name: 'x\\x00y' contains a NUL"),
        ("/v1/unload_lora_adapter", {"lora_name": "x", "lora_int_id": 1}, "lora_int_id is not supported"),
    ],
)
async def test_wrong_bodies(start: Callable[..., Any], path: str, body: dict[str, Any], said: str) -> None:
    gateway = await start(scripted(), admin_key=KEY["inflight-admin-key"])
    response = await gateway.post(path, body, headers=KEY)
    assert response.status_code == 400 and said in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_only_the_admin_key_changes_adapters(start: Callable[..., Any], path: str) -> None:
    body = {"lora_name": "doll", "lora_path": "/loras/doll"}
    off = await start(scripted(), api_keys=("user",))
    response = await off.post(path, body, headers={"authorization": "Bearer user", **KEY})
    assert response.status_code == 403 and "no admin key" in response.json()["error"]["message"]
    gateway = await start(scripted(), api_keys=("user",), admin_key=KEY["inflight-admin-key"])
    for headers in ({}, KEY, {"authorization": f"Bearer {KEY['inflight-admin-key']}"}):
        assert (await gateway.post(path, body, headers=headers)).status_code == 401
    for wrong in ({}, {"inflight-admin-key": ""}, {"inflight-admin-key": "user"}, {"inflight-admin-key": "\u00e9"}):
        headers = {"authorization": "Bearer user", **wrong}
        encoded = {name: value.encode("utf-8") for name, value in headers.items()}
        assert (await gateway.post(path, body, headers=encoded)).status_code == 403
    assert not gateway.client.changes
    bearer = await start(scripted(), admin_key=KEY["inflight-admin-key"])
    response = await bearer.post(
        path, {**body, "load_inplace": True} if "/load" in path else {"lora_name": "doll"},
        headers={"authorization": f"Bearer {KEY['inflight-admin-key']}"},
    )  # fmt: skip
    assert response.status_code == 200, response.text


async def test_all_tritons_of_the_model_load_it(start: Callable[..., Any]) -> None:
    first, second = scripted(), scripted()
    options = {"triton": ("one:1", "two:2"), "admin_key": KEY["inflight-admin-key"]}
    gateway = await start(first, **options)
    gateway.gateway.replicas._clients["two:2"] = second
    body = {"lora_name": "new", "lora_path": "/loras/new"}
    assert (await gateway.post("/v1/load_lora_adapter", body, headers=KEY)).status_code == 200
    assert "new" in first.info["adapters"] and "new" in second.info["adapters"]
    second.change = lambda name, parameters: _raise(UnavailableError("the engine process died"))  # type: ignore[method-assign]
    response = await gateway.post("/v1/load_lora_adapter", {**body, "load_inplace": True}, headers=KEY)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "two:2: the engine process died; done at one:1"
    response = await gateway.post("/v1/load_lora_adapter", {**body, "lora_name": "newer"}, headers=KEY)
    said = "two:2: the engine process died; done at one:1; to load it at the others, send load_inplace=true"
    assert response.json()["error"]["message"] == said


def _raise(error: Exception) -> str:
    raise error


async def test_a_model_without_adapters_says_so(start: Callable[..., Any]) -> None:
    gateway = await start(scripted(adapters=None), admin_key=KEY["inflight-admin-key"])
    body = {"lora_name": "new", "lora_path": "/loras/new"}
    response = await gateway.post("/v1/load_lora_adapter", body, headers=KEY)
    assert response.status_code == 400 and "models here: none" in response.json()["error"]["message"]
    assert [card["id"] for card in (await gateway.http.get("/v1/models")).json()["data"]] == ["demo"]


async def test_ten_thousand_adapters_make_no_long_error(start: Callable[..., Any]) -> None:
    gateway = await start(scripted(adapters={f"a{k}": "c" * 32 for k in range(10_000)}))
    response = await gateway.post("/v1/completions", {"model": "x", "prompt": "a"})
    assert response.status_code == 404 and len(response.text) < 2000
    assert (await gateway.post("/v1/completions", {"model": "a9999", "prompt": "a"})).status_code == 200
