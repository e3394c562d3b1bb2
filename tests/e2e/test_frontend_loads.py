"""Models whose engine is the fake one are loaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from fake_clients import BACKEND_ERROR, PROMPT, Grpc, flags, joined, post, slow, text
from fake_repository import FAKE_CONFIG, fake_options
from frontend_rig import write_orders
from model_entries import load, loaded, wait_unloaded, write_entry
from tritonclient.utils import InferenceServerException
from wire import wait_for

from inflight_tools.launcher import TritonServer

UNLOADS = 100
HEALTH = 'parameters { key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "true" } }\n'


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Orders for the engine of the model `checked`."""
    return tmp_path_factory.mktemp("checked") / "control.json"


@pytest.fixture(scope="module")
def checked(triton: TritonServer, control: Path) -> Iterator[TritonServer]:
    """The server with the model `checked`, which tells each request whether it has an engine."""
    options = fake_options(control.parent, {"FAKE_ENGINE_CONTROL": str(control)})
    with loaded(triton, checked={"config": FAKE_CONFIG + HEALTH, **options}):
        yield triton


def test_load_errors_name_their_cause(checked: TritonServer, tmp_path: Path) -> None:
    """On a server that no test asks whether it is ready: with a failed load it is not."""
    told = tmp_path / "control.json"
    told.write_text('{"start": "fatal"}')
    options = fake_options(tmp_path, {"FAKE_ENGINE_CONTROL": str(told)})
    causes: dict[str, tuple[dict[str, Any], str]] = {
        "misspelt": ({"max_num_seq": 3}, r"unknown key 'max_num_seq'; did you mean 'max_num_seqs'\?"),
        "empty": ({"max_num_seqs": 0}, "max_num_seqs=0"),
        "lost": ({"model": "no/such/checkpoint"}, "no/such/checkpoint"),
        "bare": ({"enable_lora": True}, r"Triton backend cannot find \S+/bare/1/multi_lora\.json\."),
        "fatal": ({}, "told to fatal"),
    }

    def fails(name: str) -> None:
        changes, message = causes[name]
        write_entry(checked.repositories[-1], name, FAKE_CONFIG, **{**options, **changes})
        with pytest.raises(InferenceServerException, match=message):
            load(checked, name)

    with ThreadPoolExecutor() as threads:
        list(threads.map(fails, causes))
    with grpcclient.InferenceServerClient(checked.grpc_address) as client:
        assert client.is_model_ready("checked"), "others are not affected"


def test_with_a_health_check_no_request_waits_for_an_engine(checked: TritonServer, control: Path) -> None:
    def asked(**changes: Any) -> tuple[int, str]:
        return post(checked, "generate", {"text_input": PROMPT, **changes}, model="checked")

    assert asked()[0] == 200
    write_orders(control, start="fail")
    asked(tenant="crash=2", max_tokens=9)
    for _ in range(3):
        status, answer = asked()
        assert (status, "Model is unavailable due to unhealthy engine: " in answer) == (BACKEND_ERROR, True)
    control.unlink()
    wait_for(lambda: asked()[0] == 200)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # a turn takes 3 seconds, and three times as long on a busy machine
def test_a_hundred_unloads_under_traffic_lose_no_output(triton: TritonServer, tmp_path: Path) -> None:
    """Kept output tensors are in the shared memory of a model instance, which goes with it."""
    entry = write_entry(triton.repositories[-1], "often", FAKE_CONFIG, **fake_options(tmp_path, {}))
    returns = flags("stream", "return_finish_reason", "return_num_input_tokens", "return_token_ids")
    control = grpcclient.InferenceServerClient(triton.grpc_address)
    answers = set()
    for _ in range(UNLOADS):
        load(triton, entry.name)
        grpc = Grpc(triton, entry.name)
        for number in range(8):
            grpc.send(text(), *returns, request_id=str(number), **slow(tokens=40, delay=0.002))
        first = [grpc.queues[str(number)].get(timeout=30) for number in range(8)]
        control.unload_model(entry.name, headers=triton.admin_metadata)
        for number in range(8):
            *early, last = [first[number], *grpc.take(str(number))]
            assert last.as_numpy("finish_reason").tolist() == [b"length"]
            assert all(one.as_numpy("finish_reason").tolist() == [b"None"] for one in early)
            assert sum(int(one.as_numpy("token_counts")[0]) for one in [*early, last]) == 40
            answers.add(joined([*early, last]))
        grpc.close()  # Triton keeps a model while a gRPC stream that used it is open
        wait_unloaded(triton, entry.name)
    control.close()
    assert len(answers) == 1
