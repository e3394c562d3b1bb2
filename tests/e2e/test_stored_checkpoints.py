"""A checkpoint in integers behind a tritonserver, by an entry that vllm_backend would take."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import greedy_reference, make_checkpoint
from integer_checkpoints import write
from model_entries import loaded
from safetensors.torch import load_file, save_file
from wire import GrpcStream

PROMPT, COUNT = [7, 3, 9, 100, 5] * 4, 16


@pytest.mark.nightly
def test_the_tokens_are_those_of_the_plain_weights(triton, tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path / "codes")
    plain = str(shutil.copytree(path, tmp_path / "plain"))
    actual = write(path, "awq")
    file = Path(plain) / "model.safetensors"
    save_file({**load_file(file), **actual}, file, metadata={"format": "pt"})
    entry = {"model": path, "quantization": "awq_marlin", "tensor_parallel_size": 1, "disable_log_requests": True}
    with loaded(triton, quantized=entry) as server:
        stream = GrpcStream(server.grpc_address, "quantized")
        parameters = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        stream.send("0", input_ids=PROMPT, stream=True, sampling_parameters=parameters, return_token_ids=True)
        stream.wait("0")
        stream.close()
        answer = stream.answers["0"]
    assert answer.error is None
    assert answer.sequence(0) == greedy_reference(plain, [PROMPT], [COUNT])[0]
