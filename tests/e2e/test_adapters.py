"""LoRA adapters through a real tritonserver: vllm_backend's multi-LoRA tests, loads under traffic, replay.

The engine is the fake one, which computes other tokens for each adapter, and only from files that are what they were.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from adapter_folders import write_adapter
from fake_repository import FAKE_CONFIG, fake_options
from frontend_rig import demo_tokenizer
from guarded_entry import KEY
from model_entries import load, loaded, write_entry
from processes_of import model_processes
from tritonclient.utils import InferenceServerException
from wire import GrpcStream, gauges, post, wait_for

from inflight.adapters.spec import describe_adapter
from inflight.engine.adapter import AdapterRef
from inflight_client import Client, InflightError
from inflight_tools.launcher import TritonServer

TOKENIZER = demo_tokenizer()
PROMPT = "the list of names"
GREEDY = {"temperature": "0", "top_p": "1"}
TWO = FAKE_CONFIG.replace("kind: KIND_CPU", "kind: KIND_CPU, count: 2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("doll", "sheep", "bactrian")):
        write_adapter(root / "loras" / name, seed=seed, targets=["q_proj"])
    return root


@pytest.fixture(scope="module")
def dressed(guarded: TritonServer, root: Path) -> Iterator[TritonServer]:
    """The model `dressed` has two adapters; two stubs share its engine.  `bare` has LoRA off."""
    options = fake_options(root) | {
        "max_num_seqs": 64,
        "spare_engine": True,
        "lora_allowed_paths": [str(root / "loras")],
    }
    entry = write_entry(guarded.repositories[-1], "dressed", TWO, enable_lora="true", **options)
    shutil.copytree(root / "loras" / "doll", entry / "1" / "loras" / "doll")
    multi_lora = {"doll": "./loras/doll", "sheep": str(root / "loras" / "sheep")}
    (entry / "1" / "multi_lora.json").write_text(json.dumps(multi_lora))
    write_entry(guarded.repositories[-1], "bare", FAKE_CONFIG, enable_lora="false", **options)
    with loaded(guarded, "dressed", "bare") as server:
        yield server


def ref(folder: Path) -> AdapterRef:
    return describe_adapter(folder, "any", 4096)


def expected(folder: Path | None, count: int = 16) -> list[int]:
    return fake_engine.echo(TOKENIZER.encode(PROMPT), count, None if folder is None else ref(folder))


def text_of(folder: Path | None) -> str:
    return TOKENIZER.decode(expected(folder))


@pytest.fixture
def client(dressed: TritonServer) -> Iterator[Client]:
    with Client(dressed.grpc_address, model="dressed") as client:
        yield client


def ids(client: Client) -> dict[str, str]:
    found: dict[str, str] = client.model_info()["adapters"]
    return found


def tokens(client: Client, **options: Any) -> list[int]:
    return client.generate(PROMPT, max_tokens=16, **options).choices[0].token_ids


# -- vllm_backend's ci/L0_multi_gpu_vllm/multi_lora ----------------------------------------------------


def tensor(name: str, value: str | bool) -> grpcclient.InferInput:
    is_text = isinstance(value, str)
    found = grpcclient.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    found.set_data_from_numpy(np.array([value.encode()], dtype=object) if is_text else np.array([value]))
    return found


def asked(server: TritonServer, model: str, lora_name: str) -> Any:
    """The result, or the error, of a request as that test sends it."""

    answers: queue.Queue[Any] = queue.Queue()
    inputs = [
        tensor("text_input", PROMPT),
        tensor("stream", False),
        tensor("sampling_parameters", json.dumps({**GREEDY, "lora_name": lora_name})),
        tensor("exclude_input_in_output", True),
    ]
    with grpcclient.InferenceServerClient(server.grpc_address) as one:
        one.start_stream(lambda result, error: answers.put(error or result))
        one.async_stream_infer(model, inputs, request_id="0", parameters=GREEDY)
        one.stop_stream()
    return answers.get(timeout=30)


def generated(server: TritonServer, model: str, lora_name: str) -> dict[str, Any]:
    parameters = {
        "stream": False,
        "temperature": 0,
        "top_p": 1,
        "lora_name": lora_name,
        "exclude_input_in_output": True,
    }
    url = f"http://{server.http_address}/v2/models/{model}/generate"
    _, answer = post(url, {"text_input": PROMPT, "parameters": parameters})
    return dict(json.loads(answer))


def test_multi_lora_requests(dressed: TritonServer, root: Path) -> None:
    for name in ("doll", "sheep"):
        wanted = text_of(root / "loras" / name)
        assert asked(dressed, "dressed", name).as_numpy("text_output")[0].decode() == wanted
        assert generated(dressed, "dressed", name)["text_output"] == wanted
    assert text_of(root / "loras" / "doll") != text_of(root / "loras" / "sheep") != text_of(None)


def test_none_exist_lora(dressed: TritonServer) -> None:
    said = "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    error = asked(dressed, "dressed", "bactrian")
    assert isinstance(error, InferenceServerException) and error.message() == said
    assert generated(dressed, "dressed", "bactrian")["error"] == said


def test_lora_is_off(dressed: TritonServer) -> None:
    for name in ("doll", "bactrian"):
        assert asked(dressed, "bare", name).message() == "LoRA feature is not enabled."
        assert generated(dressed, "bare", name)["error"] == "LoRA feature is not enabled."


def test_a_missing_or_wrong_file_is_the_error_of_the_load(dressed: TritonServer, root: Path) -> None:
    entry = write_entry(dressed.repositories[-1], "broken", FAKE_CONFIG, enable_lora=True, **fake_options(root))
    with pytest.raises(InferenceServerException, match=f"Triton backend cannot find {entry}/1/multi_lora.json."):
        load(dressed, "broken")
    (entry / "1" / "multi_lora.json").write_text('{"doll": "/nowhere"}')
    with pytest.raises(InferenceServerException, match="adapter 'doll': there is no folder /nowhere"):
        load(dressed, "broken")
    shutil.rmtree(entry)


# -- names, numbers, vectors ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("lora_task_id", 2), ("lora_id", 2)])
def test_tensorrt_llms_numbers(dressed: TritonServer, root: Path, name: str, value: int) -> None:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, name: value}
    _, answer = post(f"http://{dressed.http_address}/v2/models/dressed/generate", body)
    assert json.loads(answer)["text_output"] == text_of(root / "loras" / "sheep")


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


def of_tokens(count: int) -> dict[str, Any]:
    """The length as a sampling key: the streams of `wire` have no tensor for it."""
    return {"sampling_parameters": {"max_tokens": count}}


# -- control -------------------------------------------------------------------------------------------


def control(client: Client, name: str, key: str | None = KEY, **parameters: Any) -> dict[str, Any]:
    return dict(json.loads(client.control(name, admin_key=key, parameters=parameters)))


def test_loads_need_the_key(client: Client, root: Path) -> None:
    for name in ("load_adapter", "unload_adapter"):
        for key in (None, "", KEY[:-1]):
            with pytest.raises(InflightError, match=f"control='{name}': the admin key is (missing|wrong)"):
                control(client, name, key, lora_name="doll")
    assert list(ids(client)) == ["doll", "sheep"]


def test_load_reload_and_unload_under_traffic(dressed: TritonServer, client: Client, root: Path) -> None:
    """Open streams keep the content that they began with, on both stubs; new requests get the new one."""
    folder = write_adapter(root / "loras" / "other", seed=10, targets=["q_proj"])
    before = folder.with_name("before")
    shutil.copytree(folder, before)
    answer = control(client, "load_adapter", lora_name="other", lora_path=str(folder))
    assert (answer["lora_id"], answer["instances"]) == (3, 2)
    with GrpcStream(dressed.grpc_address, "dressed") as stream:
        slow = {"stream": True, "return_token_ids": True, "tenant": "delay=0.02", **of_tokens(100)}
        names = [f"s{k}" for k in range(8)]
        for name in names:
            stream.send(name, text_input=PROMPT, lora_name="other", **slow)
        wait_for(lambda: all(stream.answers[name].chunks for name in names))
        write_adapter(folder, seed=11, targets=["q_proj"])
        with pytest.raises(InflightError, match="has already been loaded"):
            control(client, "load_adapter", lora_name="other", lora_path=str(folder))
        again = control(client, "load_adapter", lora_name="other", lora_path=str(folder), load_inplace=True)
        assert again["replaced"] == answer["id"] != again["id"] and again["instances"] == 2
        for _ in range(6):  # both stubs
            assert tokens(client, adapter="other") == expected(folder)
        stream.wait(*names)
        for name in names:
            assert stream.answers[name].error is None
            assert stream.answers[name].token_ids == expected(before, 100)
    control(client, "unload_adapter", lora_name="other")
    for _ in range(4):
        with pytest.raises(InflightError, match="LoRA other is not supported"):
            tokens(client, adapter="other")


def test_paths_are_the_operators_alone(client: Client, root: Path) -> None:
    outside = write_adapter(root / "outside", targets=["q_proj"])
    (root / "loras" / "link").symlink_to(outside)
    for path in (outside, root / "loras" / ".." / "outside", root / "loras" / "link", "relative", "/proc/self/root"):
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
        (lambda folder: write_adapter(folder, rank=32, targets=["q_proj"]), "at most max_lora_rank=16"),
        (lambda folder: write_adapter(folder, targets=["q_proj"], use_dora=True), "DoRA is not served"),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line_and_nothing_else_changes(
    client: Client, root: Path, damage: Any, said: str
) -> None:
    folder = write_adapter(root / "loras" / "damaged", targets=["q_proj"])
    damage(folder)
    before = ids(client)
    with pytest.raises(InflightError) as caught:
        control(client, "load_adapter", lora_name="damaged", lora_path=str(folder))
    assert said in caught.value.message and "damaged" in caught.value.message and "\n" not in caught.value.message
    assert ids(client) == before
    assert tokens(client, adapter="doll") == expected(root / "loras" / "doll")


def fake_engine_of(server: TritonServer, model: str) -> psutil.Process:
    """The fork of the spare process: both have the same command line."""
    fakes = [process for process in model_processes(server, model) if fake_engine.__file__ in process.cmdline()]
    (engine,) = (process for process in fakes if process.ppid() in {fake.pid for fake in fakes})
    return engine


# -- replay and metrics ----------------------------------------------------------------------------------


def test_streams_of_all_adapters_survive_the_engine(dressed: TritonServer, client: Client, root: Path) -> None:
    """Replayed with the bytes that were accepted, whatever has happened to the operator's folder meanwhile."""
    folder = write_adapter(root / "loras" / "volatile", seed=20, targets=["q_proj"])
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    control(client, "load_adapter", lora_name="volatile", lora_path=str(folder))
    folders = {"doll": root / "loras" / "doll", "sheep": root / "loras" / "sheep", "volatile": kept, None: None}
    with GrpcStream(dressed.grpc_address, "dressed") as stream:
        sent = {}
        for k in range(24):
            name = list(folders)[k % 4]
            adapter = {} if name is None else {"lora_name": name}
            options = {"stream": True, "return_token_ids": True, "tenant": "delay=0.01", **of_tokens(80)}
            stream.send(f"s{k}", text_input=PROMPT, **adapter, **options)
            sent[f"s{k}"] = folders[name]
        wait_for(lambda: all(stream.answers[key].chunks for key in sent))
        os.truncate(folder / "adapter_model.safetensors", 0)
        shutil.rmtree(folder)
        control(client, "unload_adapter", lora_name="volatile")
        fake_engine_of(dressed, "dressed").kill()
        stream.wait(*sent)
        for key, its_folder in sent.items():
            assert stream.answers[key].error is None
            assert stream.answers[key].token_ids == expected(its_folder, 80)
    assert gauges(dressed.metrics_address, "dressed")["inflight_requests_replayed_total"] == len(sent)


def test_metrics_of_adapters(dressed: TritonServer, client: Client) -> None:
    def shown() -> list[str]:

        with urllib.request.urlopen(f"http://{dressed.metrics_address}/metrics") as response:
            lines = response.read().decode().splitlines()
        return [line for line in lines if ('model="dressed"' in line and "lora" in line) or "adapter" in line]

    with GrpcStream(dressed.grpc_address, "dressed") as stream:
        options = {"stream": True, "tenant": "delay=0.05", **of_tokens(100)}
        for k in range(4):
            stream.send(f"s{k}", text_input=PROMPT, lora_name="sheep", **options)
        wait_for(lambda: gauges(dressed.metrics_address, "dressed").get("inflight_adapter_requests") == 4)
        wait_for(lambda: any('running_lora_adapters="sheep"' in line and 'max_lora="32"' in line for line in shown()))
    wait_for(lambda: gauges(dressed.metrics_address, "dressed").get("inflight_adapter_requests") == 0)
    assert any('outcome="loaded"' in line for line in shown())
