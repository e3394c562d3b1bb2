"""Triton's own OpenAI frontend, which hosts the server in its process, with this backend in the place of vllm_backend.

It is no package: `python/openai` of https://github.com/triton-inference-server/server, and the wheel `tritonserver`
(Python 3.12; or `python/` of triton-inference-server/core, built for another one), which loads `libtritonserver.so`.
The tests run where both are given:

    INFLIGHT_TRITON_FRONTEND=server/python/openai  INFLIGHT_TRITON_FRONTEND_PYTHON=venv/bin/python
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from adapters import make_adapter
from model_entries import CHECKPOINT, write_entry
from openai import OpenAI

import inflight
from inflight import LLM
from inflight_tools.installation import LauncherError, TritonInstallation, find_libpython, lay_out_interpreter
from inflight_tools.ports import pick_ports
from inflight_tools.sweeper import kill_session, remove_shared_memory

FRONTEND, PYTHON = (os.environ.get(f"INFLIGHT_TRITON_FRONTEND{end}") for end in ("", "_PYTHON"))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FRONTEND or not PYTHON, reason="INFLIGHT_TRITON_FRONTEND and _PYTHON: see the module"),
]
SHM = "triton_frontend_"
# Its options name no folder of backends.
START = f"""
import os, sys
sys.path.insert(0, {str(Path(FRONTEND or "") / "openai_frontend")!r})
import tritonserver
plain = tritonserver.Server
prefix = {{"shm-region-prefix-name": {SHM!r}}}
tritonserver.Server = lambda **options: plain(
    backend_directory=os.environ["BACKENDS"], backend_configuration={{"python": prefix, "vllm": prefix}}, **options)
import main
main.main()
"""
CHAT = [{"role": "user", "content": "Return a list of"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    try:
        installation = TritonInstallation.find()
    except LauncherError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("frontend")
    entry = write_entry(folder / "models", "demo", 'backend: "vllm"\n', enable_lora="true")
    doll = make_adapter(folder / "doll", str(CHECKPOINT), ("q_proj", "v_proj"), seed=1)
    (entry / "1" / "multi_lora.json").write_text(json.dumps({"doll": doll.path}))
    installation.lay_out(folder / "backends", {"vllm": Path(inflight.__file__).parent})
    library = folder / "lib"
    library.mkdir()
    (library / find_libpython().name).symlink_to(find_libpython())
    for place in installation.library_dirs:
        for found in place.glob("libtritonserver*.so"):
            (library / "libtritonserver.so").symlink_to(found)
    libraries = [str(library), *map(str, installation.library_dirs)]
    interpreter = lay_out_interpreter(folder / "python")
    (folder / "template.jinja").write_text(TEMPLATE)
    (port,) = pick_ports(1)
    options = ["--model-repository", folder / "models", "--tokenizer", CHECKPOINT, "--openai-port", str(port)]
    options += ["--lora-separator", "_lora_", "--host", "127.0.0.1", "--chat-template", folder / "template.jinja"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(PYTHON), "-c", START, *map(str, options)],
            env=os.environ | {
                "BACKENDS": str(folder / "backends"),
                "PATH": f"{interpreter}:{os.environ['PATH']}",
                "LD_LIBRARY_PATH": ":".join(libraries),
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 300
        while not is_ready(address):
            assert process.poll() is None and time.monotonic() < until, log.read_text(errors="replace")[-6000:]
            time.sleep(0.2)
        yield address
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
    finally:
        process.send_signal(signal.SIGKILL)
        kill_session(process.pid)
        process.wait()
        remove_shared_memory(SHM)


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def client(frontend: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{frontend}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chats_streams_usage_and_log_probabilities(client: OpenAI) -> None:
    asked = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == 12 == len(whole.choices[0].logprobs.content)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 2
    assert chunks[-1].usage == whole.usage
    completion = client.completions.create(model="demo", prompt=CHAT[0]["content"], temperature=0, max_tokens=12)
    assert completion.choices[0].text == whole.choices[0].message.content


def test_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model="demo", input="Return a list of")
    vector = np.array(answer.data[0].embedding)
    with LLM(str(CHECKPOINT), dtype="float32", cpu_threads=1, kv_cache_memory="64MiB") as llm:
        (expected,) = llm.embed("Return a list of")
    np.testing.assert_allclose(vector, expected.outputs.embedding, rtol=1e-4, atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    with pytest.raises(openai.InternalServerError):  # the frontend passes no reason on
        client.embeddings.create(model="demo", input="a text", dimensions=8)


def test_adapters_are_models(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"demo", "demo_lora_doll"}
    asked = {"prompt": "Return a list of", "temperature": 0, "max_tokens": 12}
    dressed, base = (client.completions.create(model=name, **asked) for name in ("demo_lora_doll", "demo"))
    assert dressed.choices[0].text != base.choices[0].text
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo_lora_sheep", **asked)
