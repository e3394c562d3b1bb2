"""Checkpoints of `inflight quantize`, read by the package that defines the format: `pip install compressed-tensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from inflight import LLM, SamplingParams
from inflight_tools.cli import app

PROMPT = [5, 17, 3, 99, 42, 8, 120]


@pytest.fixture(scope="module", params=[("llama", "16"), ("qwen3", "4")], ids=["llama", "qwen3, head in codes"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("compressed_tensors")
    model_type, head_bits = request.param
    folder = tmp_path_factory.mktemp("others")
    path = make_checkpoint(model_type, folder)
    arguments = ["quantize", path, "-o", str(folder / "int4"), "--sample-tokens", "32", "--head-bits", head_bits]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return folder / "int4"


def test_its_tokens_through_transformers_are_ours(quantized: Path) -> None:
    from transformers import CompressedTensorsConfig

    # Without `dequantize` transformers has no room for packed zero points (compressed-tensors 0.20).
    asked = CompressedTensorsConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=asked, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(PROMPT) :].tolist()
    with LLM(str(quantized), device="cpu", dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        assert llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids == theirs


def test_its_configuration_is_what_the_package_writes(quantized: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    ours = json.loads((quantized / "config.json").read_text())["quantization_config"]
    read = json.loads(QuantizationConfig.model_validate(ours).model_dump_json())
    for name, group in read["config_groups"].items():
        assert group["weights"].items() <= ours["config_groups"][name]["weights"].items()
    same = ("format", "ignore", "quant_method", "quantization_status", "kv_cache_scheme", "global_compression_ratio")
    assert {key: read[key] for key in same} == {key: ours[key] for key in same}
