"""LoRA adapters through a real tritonserver: vllm_backend's multi-LoRA tests, loads under traffic, replay.

What adapters compute is compared with checkpoints that they are merged into, in float32.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from adapter_folders import write_adapter
from adapter_requests import (
    LARGE,
    LONG,
    PROMPT,
    TOKENIZER,
    asked,
    control,
    generated,
    ids,
    next_engine,
    options,
    stops_in_load,
    tensor,
    text_of,
    tokens,
)
from adapters import merged_checkpoint
from checkpoints import greedy_reference
from guarded_entry import KEY
from model_entries import CHECKPOINT, CONFIG, load, loaded, write_entry
from openai import NotFoundError, OpenAI
from processes_of import (
    call_in_turns,
    engine_process,
    model_processes,
    open_when_stopped,
    run_in_turns,
    stubs,
    tries,
)
from safetensors import safe_open
from safetensors.numpy import save_file
from tritonclient.utils import InferenceServerException
from wire import GrpcStream, gauges, post, wait_for

from inflight.adapters.spec import describe_adapter
from inflight_client import Client, InflightError
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.admin import grpc_metadata
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

TWO = CONFIG + "instance_group [ { kind: KIND_CPU, count: 2 } ]\n"
NAMES = ("doll", "sheep", "other", "again", "volatile")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of adapters: `loras` is what operators may load from."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(root / "originals" / name, seed=seed)
    for name in ("doll", "sheep"):
        shutil.copytree(root / "originals" / name, root / "loras" / name)
    return root


@pytest.fixture(scope="module")
def dressed(guarded: TritonServer, root: Path) -> Iterator[TritonServer]:
    """The model `dressed` has two adapters; two stubs share its engine.  In `mine` LoRA is off."""
    options = {"max_num_seqs": 64, "lora_allowed_paths": [str(root / "loras")]}
    entry = write_entry(guarded.repositories[-1], "dressed", TWO, enable_lora="true", **options)
    shutil.copytree(root / "originals" / "doll", entry / "1" / "loras" / "doll")
    multi_lora = {"doll": "./loras/doll", "sheep": str(root / "loras" / "sheep")}
    (entry / "1" / "multi_lora.json").write_text(json.dumps(multi_lora))
    with loaded(guarded, "dressed") as server:
        yield server


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str | None, list[int]]:
    """The tokens of each adapter, and without one."""
    prompt = TOKENIZER.encode(PROMPT)
    found = {}
    for name in (*NAMES, None):
        checkpoint = str(CHECKPOINT)
        if name is not None:
            ref = describe_adapter(root / "originals" / name, name, 16)
            checkpoint = merged_checkpoint(checkpoint, ref, root / "merged" / name)
        (found[name],) = greedy_reference(checkpoint, [prompt], [LONG])
    assert len({tuple(tokens[:16]) for tokens in found.values()}) == len(found)
    return found


@pytest.fixture
def client(dressed: TritonServer) -> Iterator[Client]:
    with Client(dressed.grpc_address, model="dressed") as client:
        yield client


# -- vllm_backend's ci/L0_multi_gpu_vllm/multi_lora ----------------------------------------------------


def test_multi_lora_requests(dressed: TritonServer, expected: dict[str | None, list[int]]) -> None:
    for name in ("doll", "sheep"):
        wanted = text_of(expected[name])
        assert asked(dressed, "dressed", name).as_numpy("text_output")[0].decode() == wanted
        assert generated(dressed, "dressed", name)["text_output"] == wanted


def test_none_exist_lora(dressed: TritonServer) -> None:
    said = "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    error = asked(dressed, "dressed", "bactrian")
    assert isinstance(error, InferenceServerException) and error.message() == said
    assert generated(dressed, "dressed", "bactrian")["error"] == said


def test_lora_is_off(dressed: TritonServer) -> None:
    for name in ("doll", "bactrian"):
        assert asked(dressed, "mine", name).message() == "LoRA feature is not enabled."
        assert generated(dressed, "mine", name)["error"] == "LoRA feature is not enabled."


@pytest.mark.nightly
def test_an_adapter_that_does_not_fit_the_checkpoint_is_the_error_of_the_load(triton: TritonServer, root: Path) -> None:
    """The engine finds it; neither its process nor the stub stays."""
    shape = json.loads((CHECKPOINT / "config.json").read_text())
    wider = root / "wider"
    wider.mkdir()
    (wider / "config.json").write_text(json.dumps({**shape, "intermediate_size": 800}))
    folder = write_adapter(root / "misfit", checkpoint=wider)
    entry = write_entry(triton.repositories[-1], "misfit", enable_lora=True)
    (entry / "1" / "multi_lora.json").write_text(json.dumps({"misfit": str(folder)}))
    with pytest.raises(
        InferenceServerException,
        match=r"multi_lora.json: adapter 'misfit': .*down_proj.*the adapter is of another model",
    ):
        load(triton, "misfit")
    wait_for(lambda: not model_processes(triton, "misfit"))
    shutil.rmtree(entry)


# -- names, numbers, vectors ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("lora_task_id", 2), ("lora_id", 2)])
def test_tensorrt_llms_numbers(
    dressed: TritonServer, expected: dict[str | None, list[int]], name: str, value: int
) -> None:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "temperature": 0, name: value}
    _, answer = post(f"http://{dressed.http_address}/v2/models/dressed/generate", body)
    assert json.loads(answer)["text_output"] == text_of(expected["sheep"])


def test_weights_in_a_request_are_refused(dressed: TritonServer) -> None:
    weights = grpcclient.InferInput("lora_weights", [2, 8], "FP16")
    weights.set_data_from_numpy(np.zeros((2, 8), dtype=np.float16))
    with grpcclient.InferenceServerClient(dressed.grpc_address) as one:
        answers: queue.Queue[Any] = queue.Queue()
        one.start_stream(lambda result, error: answers.put(error or result))
        one.async_stream_infer("dressed", [tensor("text_input", PROMPT), weights])
        one.stop_stream()
    assert "lora_weights: a request cannot bring an adapter" in answers.get(timeout=30).message()


def test_the_content_is_told_on_request(dressed: TritonServer, client: Client) -> None:
    with GrpcStream(dressed.grpc_address, "dressed") as stream:
        stream.send("a", text_input=PROMPT, stream=True, lora_name="doll", return_lora_digest=True)
        stream.send("b", text_input=PROMPT, stream=True, return_lora_digest=True)
        stream.wait("a", "b")
        digests = {chunk["lora_digest"][0].decode() for chunk in stream.answers["a"].chunks}
        assert digests == {ids(client)["doll"]}
        assert not any("lora_digest" in chunk for chunk in stream.answers["b"].chunks)


# -- control -------------------------------------------------------------------------------------------


def test_loads_need_the_key(client: Client, root: Path) -> None:
    for name in ("load_adapter", "unload_adapter"):
        for key in (None, "", KEY[:-1]):
            with pytest.raises(InflightError, match=f"control='{name}': the admin key is (missing|wrong)"):
                control(client, name, key, lora_name="doll")
    assert list(ids(client)) == ["doll", "sheep"]


def test_load_reload_and_unload_under_traffic(
    dressed: TritonServer, client: Client, root: Path, expected: dict[str | None, list[int]]
) -> None:
    """Open streams keep the content that they began with, on both stubs; new requests get the new one."""
    folder = root / "loras" / "other"
    shutil.copytree(root / "originals" / "other", folder)
    first = control(client, "load_adapter", lora_name="other", lora_path=str(folder))
    assert (first["lora_id"], first["instances"]) == (3, 2)
    engine = engine_process(dressed, "dressed")
    loaded = [first["id"]]

    def is_replaced_under_streams(old: str, new: str) -> bool:
        """Returns whether they were open until then."""
        with GrpcStream(dressed.grpc_address, "dressed") as stream:
            names = [f"s{k}" for k in range(6)]
            engine.suspend()
            for name in names:
                stream.send(name, text_input=PROMPT, lora_name="other", **options(LONG))
            run_in_turns(engine, lambda seconds: all(stream.has_chunks(name, 1, seconds) for name in names))
            shutil.rmtree(folder)
            shutil.copytree(root / "originals" / new, folder)
            change = (engine, control, client, "load_adapter")
            with pytest.raises(InflightError, match="has already been loaded"):
                call_in_turns(*change, lora_name="other", lora_path=str(folder))
            second = call_in_turns(*change, lora_name="other", lora_path=str(folder), load_inplace=True)
            assert second["replaced"] == loaded[-1] != second["id"] and second["instances"] == 2
            loaded.append(second["id"])
            were_open = not any(stream.answers[name].finals for name in names)
            engine.resume()
            for _ in range(4):  # both stubs
                assert tokens(client, adapter="other") == expected[new][:16]
            stream.wait(*names)
            for name in names:
                assert stream.answers[name].error is None
                assert stream.answers[name].token_ids == expected[old]
            return were_open

    contents = ("other", "again")
    assert any(is_replaced_under_streams(*contents[:: (1, -1)[number % 2]]) for number in tries())
    control(client, "unload_adapter", lora_name="other")
    for _ in range(4):
        with pytest.raises(InflightError, match="LoRA other is not supported"):
            tokens(client, adapter="other")


def test_paths_are_the_operators_alone(client: Client, root: Path) -> None:
    outside = root / "originals" / "doll"
    (root / "loras" / "link").symlink_to(outside)
    hidden = root / "loras" / ".." / "originals" / "doll"
    for path in (outside, hidden, root / "loras" / "link", "relative", "/proc/self/root"):
        with pytest.raises(InflightError, match=r"lora_path=|leads out of the folders"):
            control(client, "load_adapter", lora_name="x", lora_path=str(path))
    with pytest.raises(InflightError, match="lora_path: a request cannot bring an adapter"):
        client.generate(PROMPT, extra_parameters={"lora_path": str(root / "loras" / "doll")})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is not PEFT's"),
        (lambda folder: os.truncate(folder / "adapter_model.safetensors", 1000), "safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"), "is a pickle"),
        (
            lambda folder: write_adapter(
                folder,
                rank=32,
            ),
            "at most max_lora_rank=16",
        ),
        (lambda folder: write_adapter(folder, targets=["q_proj"], use_dora=True), "DoRA is not served"),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line_and_nothing_else_changes(
    client: Client, root: Path, expected: dict[str | None, list[int]], damage: Any, said: str
) -> None:
    folder = write_adapter(root / "loras" / "damaged", targets=["q_proj"])
    damage(folder)
    before = ids(client)
    with pytest.raises(InflightError) as caught:
        control(client, "load_adapter", lora_name="damaged", lora_path=str(folder))
    assert said in caught.value.message and "damaged" in caught.value.message and "\n" not in caught.value.message
    assert ids(client) == before
    assert tokens(client, adapter="doll") == expected["doll"][:16]


# -- vectors, and OpenAI's API ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateway(dressed: TritonServer) -> Iterator[str]:
    (port,) = pick_ports(1)
    options = GatewayOptions(admin_key=KEY, headers=grpc_metadata(KEY))
    process = GatewayProcess(options, ServerOptions(port=port, exit_timeout=2))
    process.start(dressed.grpc_address)
    yield process.url
    process.stop()


def test_vectors_of_an_adapter(client: Client, gateway: str) -> None:
    found = {name: client.embed(["a", "b"], **({"adapter": name} if name else {})).vectors for name in ("doll", None)}
    assert abs(found["doll"] - found[None]).max() > 1e-3
    with OpenAI(base_url=gateway, api_key="none", max_retries=0) as openai:
        answer = openai.embeddings.create(model="doll", input=["a", "b"])
    np.testing.assert_array_equal(np.array([one.embedding for one in answer.data], np.float32), found["doll"])


def test_adapters_are_models_of_the_gateway(gateway: str, expected: dict[str | None, list[int]]) -> None:
    with OpenAI(base_url=gateway, api_key="none", max_retries=0) as openai:
        parents = {card.id: getattr(card, "parent", None) for card in openai.models.list().data}
        assert parents == {"mine": None, "dressed": None, "doll": "dressed", "sheep": "dressed"}
        for model, name in (("doll", "doll"), ("dressed/sheep", "sheep"), ("dressed", None)):
            for stream in (False, True):
                options: Any = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
                answer = openai.completions.create(**options, stream=stream)
                texts = [one.choices[0].text for one in answer] if stream else [answer.choices[0].text]
                assert "".join(texts) == text_of(expected[name])


def test_vllms_endpoints_load_and_unload(
    gateway: str, root: Path, client: Client, expected: dict[str | None, list[int]]
) -> None:
    folder = root / "loras" / "again"
    shutil.copytree(root / "originals" / "again", folder)
    body = {"lora_name": "again", "lora_path": str(folder)}

    def change(path: str, **headers: str) -> httpx.Response:
        return httpx.post(f"{gateway}{path}", json=body, headers=headers, timeout=60)

    assert change("/load_lora_adapter").status_code == 403
    answer = change("/load_lora_adapter", **{"inflight-admin-key": KEY})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'again' added successfully.")
    with OpenAI(base_url=gateway, api_key="none", max_retries=0) as openai:
        options: Any = {"model": "again", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        assert openai.completions.create(**options).choices[0].text == text_of(expected["again"])
        assert change("/unload_lora_adapter", authorization=f"Bearer {KEY}").status_code == 200
        with pytest.raises(NotFoundError):
            openai.completions.create(**options)
    assert list(ids(client)) == ["doll", "sheep"]


# -- replay and metrics ----------------------------------------------------------------------------------


def test_streams_of_all_adapters_survive_the_engine(
    dressed: TritonServer, client: Client, root: Path, expected: dict[str | None, list[int]]
) -> None:
    """Replayed with the bytes that were accepted, even if something has happened to the operator's folder meanwhile."""
    folder = root / "loras" / "volatile"
    sent = {f"s{k}": ("doll", "sheep", "volatile", None)[k % 4] for k in range(16)}

    def replayed() -> float:
        return gauges(dressed.metrics_address, "dressed").get("inflight_requests_replayed_total", 0.0)

    def all_are_replayed() -> bool:
        before, engine = replayed(), engine_process(dressed, "dressed")
        shutil.copytree(root / "originals" / "volatile", folder)
        control(client, "load_adapter", lora_name="volatile", lora_path=str(folder))
        with GrpcStream(dressed.grpc_address, "dressed") as stream:
            engine.suspend()
            for key, name in sent.items():
                stream.send(key, text_input=PROMPT, **({"lora_name": name} if name else {}), **options(LONG))
            run_in_turns(engine, lambda seconds: all(stream.has_chunks(key, 1, seconds) for key in sent))
            os.truncate(folder / "adapter_model.safetensors", 0)
            shutil.rmtree(folder)
            call_in_turns(engine, control, client, "unload_adapter", lora_name="volatile")
            was_open = open_when_stopped(client, num_stubs=2, key=KEY)
            engine.kill()
            engine.wait()
            stream.wait(*sent)
            for key, name in sent.items():
                assert stream.answers[key].error is None
                assert stream.answers[key].token_ids == expected[name]
        assert replayed() - before == was_open
        return was_open == len(sent)

    assert any(all_are_replayed() for _ in tries())


@pytest.mark.nightly
def test_engines_are_killed_while_they_load_adapters(
    dressed: TritonServer, client: Client, root: Path, expected: dict[str | None, list[int]]
) -> None:
    """A control request fails alone, and is tried again; a load that replayed requests wait for begins anew."""
    folder = root / "loras" / "large"
    shutil.copytree(root / "originals" / "other", folder)
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"note": "x" * LARGE})
    before = ids(client)
    wanted: dict[str, str | None] = {}
    with GrpcStream(dressed.grpc_address, "dressed") as stream, ThreadPoolExecutor() as threads:

        def begin(engine: psutil.Process, *names: str | None) -> None:
            """Streams that have begun; the engine is stopped."""
            engine.suspend()
            begun = [f"s{len(wanted) + k}" for k in range(len(names))]
            for key, name in zip(begun, names):
                wanted[key] = "other" if name == "large" else name
                chosen: dict[str, Any] = {"lora_name": name} if name else {}
                stream.send(key, text_input=PROMPT, **chosen, **options(LONG))
            run_in_turns(engine, lambda seconds: all(stream.has_chunks(key, 1, seconds) for key in begun))

        def have_ended() -> bool:
            return all(stream.answers[key].finals or stream.answers[key].error for key in wanted)

        engine = engine_process(dressed, "dressed")
        for _ in tries():
            begin(engine, "doll", None, "sheep")
            answer = threads.submit(control, client, "load_adapter", lora_name="large", lora_path=str(folder))
            if stops_in_load(engine, answer.done):
                break
            engine.resume()
            answer.result(60)
            control(client, "unload_adapter", lora_name="large")
            stream.wait(*wanted)
        else:
            pytest.fail("no engine was stopped within a load")
        engine.kill()
        with pytest.raises(InflightError) as caught:
            answer.result(60)
        assert caught.value.code == "UNAVAILABLE" and "\n" not in caught.value.message
        assert ids(client) == before
        stream.wait(*wanted)
        control(client, "load_adapter", lora_name="large", lora_path=str(folder))
        for _ in tries():  # on a busy machine the next engine can have loaded it before it is looked at
            engine = engine_process(dressed, "dressed")
            begin(engine, "large", "doll", None, "large")
            engine.kill()
            engine = wait_for(lambda: next_engine(dressed, engine))  # noqa: B023
            if stops_in_load(engine, have_ended):
                break
            engine.resume()
        assert not have_ended(), "no engine was stopped in time"
        engine.kill()
        stream.wait(*wanted)
        for key, name in wanted.items():
            assert stream.answers[key].error is None
            assert stream.answers[key].finals == 1 and stream.answers[key].token_ids == expected[name]
    control(client, "unload_adapter", lora_name="large")
    left = ("requests_running", "requests_waiting", "kv_blocks_used", "adapter_requests")
    wait_for(lambda: not any(gauges(dressed.metrics_address, "dressed")[f"inflight_{name}"] for name in left))


def test_metrics_of_adapters(dressed: TritonServer) -> None:
    def shown() -> list[str]:
        with urllib.request.urlopen(f"http://{dressed.metrics_address}/metrics") as response:
            return [line for line in response.read().decode().splitlines() if 'model="dressed"' in line]

    def requests() -> float | None:
        return gauges(dressed.metrics_address, "dressed").get("inflight_adapter_requests")

    engine = engine_process(dressed, "dressed")
    labels = 'max_lora="32",model="dressed",running_lora_adapters="sheep"'

    def are_shown() -> bool:
        return requests() == 4 and any(line.startswith("vllm:lora_requests_info{" + labels) for line in shown())

    def are_shown_while_they_run() -> bool:
        with GrpcStream(dressed.grpc_address, "dressed") as stream:
            names = [f"s{k}" for k in range(4)]
            engine.suspend()
            for name in names:
                stream.send(name, text_input=PROMPT, lora_name="sheep", **options(LONG))
            run_in_turns(engine, lambda seconds: all(stream.has_chunks(name, 1, seconds) for name in names))
            try:
                wait_for(lambda: are_shown() or any(stream.answers[name].finals for name in names))
                found = are_shown()
            finally:
                engine.resume()
            stream.wait(*names)
        wait_for(lambda: requests() == 0)
        return found

    assert any(are_shown_while_they_run() for _ in tries())
    assert any("inflight_adapter_loads_total" in line and 'outcome="loaded"' in line for line in shown())


@pytest.mark.nightly
def test_errors_lists_and_metrics_of_ten_thousand_names(
    guarded: TritonServer, root: Path, expected: dict[str | None, list[int]]
) -> None:
    """All of one content, which is copied and loaded once.  Names that do not exist leave nothing behind."""
    entry = write_entry(guarded.repositories[-1], "crowd", enable_lora=True)
    names = [f"tenant-{number:05d}" for number in range(1, 10_001)]
    folder = str(root / "originals" / "doll")
    (entry / "1" / "multi_lora.json").write_text(json.dumps(dict.fromkeys(names, folder)))

    def shown() -> int:
        with urllib.request.urlopen(f"http://{guarded.metrics_address}/metrics") as response:
            return sum('model="crowd"' in line for line in response.read().decode().splitlines())

    with loaded(guarded, "crowd") as server, Client(server.grpc_address, model="crowd") as client:
        assert list(ids(client)) == names and len({*ids(client).values()}) == 1
        assert tokens(client, adapter=names[-1]) == expected["doll"][:16]
        before, stub = shown(), psutil.Process(stubs(server, "crowd")[0])
        memory = stub.memory_info().rss
        for number in range(2000):
            with pytest.raises(InflightError) as caught:
                client.generate(PROMPT, adapter=f"unknown-{number}")
            assert caught.value.message.endswith(" and 9900 more") and len(caught.value.message) < 3000
        assert shown() - before < 10, "counters of errors"
        assert stub.memory_info().rss - memory < 16 << 20
        for name in names[::50]:
            assert tokens(client, adapter=name) == expected["doll"][:16]
        assert shown() - before < 2 * 200 + 200, "two for each name that was open, and sets of them"
        wait_for(lambda: gauges(server.metrics_address, "crowd")["inflight_adapter_requests"] == 0)
        assert len(ids(client)) == len(names)
