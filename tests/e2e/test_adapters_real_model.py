"""Adapters of a model with real weights, through a real tritonserver: SmolLM2-135M-Instruct, rank 16, all projections.

The rows of an adapter are compared with transformers on merged weights, and those without one with an entry whose
LoRA is off, in float32.  The entry with LoRA keeps KV on a disk.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import make_adapter, merged_checkpoint
from checkpoints import greedy_reference
from guarded_entry import KEY
from model_entries import loaded, write_entry
from processes_of import engine_process, slowed
from transformers import AutoTokenizer
from wire import GrpcStream, gauges, wait_for

from inflight.adapters.spec import describe_adapter
from inflight_client import Client
from inflight_tools.launcher import TritonServer

pytestmark = pytest.mark.nightly

PROMPTS = ("The history of the city begins", "def reverse(text):\n    return", "Name three rivers in Europe:")
COUNT = 48
FIRST = 40  # tokens of an answer that a conversation returns with: two full blocks or more, with the prompt's
_ATTEMPTS = 10  # a busy machine can take longer to read than the engine expects to compute
NAMES = ("one", "two")


@pytest.fixture(scope="module")
def root(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`, and `new`, which takes the place of `two`."""
    root = tmp_path_factory.mktemp("real adapters")
    for seed, name in enumerate((*NAMES, "new")):
        make_adapter(root / "originals" / name, str(smollm2), seed=seed, rank=16, alpha=32.0, strength=0.8)
    for name in NAMES:
        shutil.copytree(root / "originals" / name, root / "loras" / name)
    return root


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [tokenizer(text).input_ids for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2: Path, root: Path, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The tokens of each adapter's merged weights, for each prompt."""
    found = {}
    for name in (*NAMES, "new"):
        ref = describe_adapter(root / "originals" / name, name, 16)
        merged = merged_checkpoint(str(smollm2), ref, root / "merged" / name)
        found[name] = greedy_reference(merged, prompts, [COUNT] * len(prompts))
        shutil.rmtree(merged)
    return found


@pytest.fixture(scope="module")
def server(guarded: TritonServer, smollm2: Path, root: Path) -> Iterator[TritonServer]:
    options = {"model": str(smollm2), "max_num_seqs": 16, "max_model_len": 256}
    repository = guarded.repositories[-1]
    lora = {"enable_lora": True, "lora_allowed_paths": [str(root / "loras")]}
    tiers = [{"type": "disk", "path": str(root / "kv"), "size": "1GiB"}]
    entry = write_entry(repository, "real", kv_tiers=tiers, **lora, **options)
    folders = {name: str(root / "loras" / name) for name in NAMES}
    (entry / "1" / "multi_lora.json").write_text(json.dumps(folders))
    write_entry(repository, "real-plain", **options)
    with loaded(guarded, "real", "real-plain") as server:
        yield server


@pytest.fixture(scope="module")
def base(server: TritonServer, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of an engine without LoRA."""
    with Client(server.grpc_address, model="real-plain") as client:
        options = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        return [client.generate(input_ids=prompt, **options).choices[0].token_ids for prompt in prompts]


def test_mixed_rows_a_reload_and_the_death_of_the_engine(
    server: TritonServer,
    root: Path,
    prompts: list[list[int]],
    expected: dict[str, list[list[int]]],
    base: list[list[int]],
) -> None:
    """`two` is loaded anew, and the engine killed, while nine streams are open."""
    sampling = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "return_token_ids": True, "sampling_parameters": sampling}
    for k in range(len(prompts)):
        assert len({tuple(tokens[k]) for tokens in (base, *expected.values())}) == 1 + len(expected), PROMPTS[k]
    engine = engine_process(server, "real")
    with GrpcStream(server.grpc_address, "real") as stream, Client(server.grpc_address, model="real") as client:
        with slowed(engine):
            sent = {}
            for name in (*NAMES, None):
                for k, prompt in enumerate(prompts):
                    own = {} if name is None else {"lora_name": name}
                    stream.send(f"{name} {k}", input_ids=prompt, **own, **options)
                    sent[f"{name} {k}"] = base[k] if name is None else expected[name][k]
            wait_for(lambda: all(stream.answers[key].chunks for key in sent))
            shutil.rmtree(root / "loras" / "two")
            shutil.copytree(root / "originals" / "new", root / "loras" / "two")
            client.control("load_adapter", admin_key=KEY, parameters={"lora_name": "two", "load_inplace": True})
            assert not any(stream.answers[key].finals for key in sent)
            engine.kill()
            engine.wait()
        for k, prompt in enumerate(prompts):
            stream.send(f"new {k}", input_ids=prompt, lora_name="two", **options)
            sent[f"new {k}"] = expected["new"][k]
        stream.wait(*sent, timeout=200)
        for key, wanted in sent.items():
            assert stream.answers[key].error is None
            assert stream.answers[key].token_ids == wanted, key


def test_what_returns_to_a_new_engine_is_read_by_its_adapter_and_salt_alone(
    server: TritonServer,
    root: Path,
    prompts: list[list[int]],
    expected: dict[str, list[list[int]]],
    base: list[list[int]],
) -> None:
    """Conversations with two adapters and with none; `two` gets other weights between the turns."""
    first = {"one": expected["one"], "two": expected["two"], None: base}
    weights = {"two": "two"}

    def load_two(original: str) -> None:
        shutil.rmtree(root / "loras" / "two")
        shutil.copytree(root / "originals" / original, root / "loras" / "two")
        with Client(server.grpc_address, model="real") as client:
            client.control("load_adapter", admin_key=KEY, parameters={"lora_name": "two", "load_inplace": True})
        weights["two"] = original

    def say(num_given: int, **salt: str) -> float:
        """All of them at once, each with so many tokens of its answer; returns how many tokens came from the disk."""
        before = settled_hits()
        sampling = {"max_tokens": COUNT - num_given, "temperature": 0, "ignore_eos": True}
        with GrpcStream(server.grpc_address, "real") as stream:
            for name in first:
                for k, prompt in enumerate(prompts):
                    own = salt if name is None else {"lora_name": name, **salt}
                    ids = prompt + answers(name)[k][:num_given]
                    options = {"stream": True, "return_token_ids": True, "sampling_parameters": sampling}
                    stream.send(f"{name} {k}", input_ids=ids, **own, **options)
            stream.wait(*stream.answers, timeout=200)
            for name in first:
                for k in range(len(prompts)):
                    assert stream.answers[f"{name} {k}"].error is None
                    assert stream.answers[f"{name} {k}"].token_ids == answers(name)[k][num_given:], (name, k)
        return settled_hits() - before

    def answers(name: str | None) -> list[list[int]]:
        return expected[weights["two"]] if name == "two" else first[name]

    def hits() -> float:
        return gauges(server.metrics_address, "real").get("vllm:external_prefix_cache_hits_total", 0.0)

    def settled_hits() -> float:
        """Once those of all steps are published."""
        first = hits()
        while time.sleep(1.1) or (now := hits()) != first:  # longer than from one publication to the next
            first = now
        return now

    load_two("two")
    say(0)
    for _ in range(_ATTEMPTS):
        engine_process(server, "real").kill()
        if say(FIRST) >= 3 * len(prompts) * 16:
            break
    else:
        raise AssertionError("too little was read")
    engine_process(server, "real").kill()
    assert say(FIRST, cache_salt="pepper") == 0
    load_two("new")
    engine_process(server, "real").kill()
    say(FIRST)
