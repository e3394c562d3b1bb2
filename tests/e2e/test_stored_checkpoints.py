"""Weights in integers behind a tritonserver: a checkpoint, by an entry that vllm_backend would take; made at load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import greedy_reference, make_checkpoint
from integer_checkpoints import write
from model_entries import CHECKPOINT, loaded
from offline import make_core, run, tokens
from safetensors.torch import load_file, save_file
from wire import GrpcStream

from inflight.engine.sampling_params import SamplingParams
from inflight_tools.launcher import TritonServer

PROMPT, COUNT = [7, 3, 9, 100, 5] * 4, 16


@pytest.mark.nightly
def test_the_tokens_are_those_of_the_plain_weights(triton, tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path / "codes")
    plain = str(shutil.copytree(path, tmp_path / "plain"))
    actual = write(path, "awq")
    file = Path(plain) / "model.safetensors"
    save_file({**load_file(file), **actual}, file, metadata={"format": "pt"})
    entry = {"model": path, "quantization": "awq_marlin", "tensor_parallel_size": 1, "disable_log_requests": True}
    assert served(triton, entry) == greedy_reference(plain, [PROMPT], [COUNT])[0]


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_codes_made_at_load_give_the_tokens_of_an_engine_in_process(triton, quantization: str) -> None:
    options = {"quantization": quantization, "dtype": "bfloat16", "cpu_threads": 1, "kv_cache_memory": "16MiB"}
    params = [SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)]
    expected = tokens(run(make_core(str(CHECKPOINT), **options), [PROMPT], params)[0, 0])
    assert served(triton, {"model": str(CHECKPOINT), **options}) == expected


def served(triton: TritonServer, entry: dict[str, Any]) -> list[int]:
    """The tokens that follow `PROMPT`, of a model with such a model.json."""
    with loaded(triton, quantized=entry) as server:
        stream = GrpcStream(server.grpc_address, "quantized")
        parameters = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        stream.send("0", input_ids=PROMPT, stream=True, sampling_parameters=parameters, return_token_ids=True)
        stream.wait("0")
        stream.close()
        answer = stream.answers["0"]
    assert answer.error is None
    return answer.sequence(0)
