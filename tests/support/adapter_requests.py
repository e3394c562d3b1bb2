"""Requests and control of models with adapters, and engines that are stopped while they load one."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from frontend_rig import demo_tokenizer
from guarded_entry import KEY
from processes_of import engine_processes, run_in_turns
from wire import post

from inflight_client import Client
from inflight_tools.launcher import TritonServer

TOKENIZER = demo_tokenizer()
PROMPT = "the list of names"
GREEDY = {"temperature": "0", "top_p": "1"}
LONG = 160  # tokens of streams that are open while adapters are loaded
LARGE = 15 << 20  # bytes of a header that an engine reads for many milliseconds


def ids(client: Client) -> dict[str, str]:
    found: dict[str, str] = client.model_info()["adapters"]
    return found


def tokens(client: Client, **options: Any) -> list[int]:
    return client.generate(PROMPT, max_tokens=16, temperature=0, ignore_eos=True, **options).choices[0].token_ids


def text_of(tokens: list[int]) -> str:
    """The text of a request without a length."""
    return TOKENIZER.decode(tokens[: tokens.index(0) if 0 in tokens[:16] else 16])


def tensor(name: str, value: str | bool) -> grpcclient.InferInput:
    is_text = isinstance(value, str)
    found = grpcclient.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    found.set_data_from_numpy(np.array([value.encode()], dtype=object) if is_text else np.array([value]))
    return found


def asked(server: TritonServer, model: str, lora_name: str) -> Any:
    """The result, or the error, of a request as the multi-LoRA test of vllm_backend sends it."""

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


def options(count: int) -> dict[str, Any]:
    """Of a stream of so many tokens."""
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"stream": True, "return_token_ids": True, "sampling_parameters": sampling}


def control(client: Client, name: str, key: str | None = KEY, **parameters: Any) -> dict[str, Any]:
    return dict(json.loads(client.control(name, admin_key=key, parameters=parameters)))


def next_engine(server: TritonServer, old: psutil.Process) -> psutil.Process | None:
    return next((one for one in engine_processes(server, "dressed") if one != old), None)


def stops_in_load(engine: psutil.Process, is_late: Callable[[], bool] = lambda: False) -> bool:
    """Let it run for moments until it has opened an adapter with a large header, and leave it stopped, even if late."""

    def loads() -> bool:
        sizes = []
        for file in Path(f"/proc/{engine.pid}/fd").iterdir():
            with suppress(OSError):  # closed before it was stopped
                if os.readlink(file).endswith("adapter_model.safetensors"):
                    sizes.append(file.stat().st_size)
        return any(size > LARGE for size in sizes)

    run_in_turns(engine, lambda seconds: loads() or is_late(), seconds=0.005)
    return loads()
