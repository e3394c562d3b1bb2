"""The probe: what layers ask of attention by argument or by mask, and what a model does with `logits_to_keep`."""

from __future__ import annotations

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from offline import make_core, run, tokens
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from inflight.attention.hf import IMPLEMENTATION
from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.load_errors import LoadError
from inflight.loading.loader import load
from inflight.loading.recognise.attention_probe import Probed, probe

CPU = torch.device("cpu")
PROMPTS = [list(range(3, 60)), [5, 6, 7]]


def loaded(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=IMPLEMENTATION).eval()


def probed(path: str, max_model_len: int = 256) -> Probed:
    model = loaded(path)
    return probe(model, model.config, max_model_len, CPU)


def windows(path: str, max_model_len: int = 256) -> list[int | None]:
    return [spec.sliding_window for _, spec in probed(path, max_model_len).layers]


def greedy_tokens(path: str, **options) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    core = make_core(path, max_num_batched_tokens=16, **options)
    deltas = run(core, PROMPTS, [params] * len(PROMPTS))
    return [tokens(deltas[index, 0]) for index in range(len(PROMPTS))]


def load_config(path: str, **options) -> EngineConfig:
    return EngineConfig.from_dict(
        {"model": path, "device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", **options}
    )


def test_a_window_that_exists_only_in_the_mask_is_served(tmp_path):
    path = make_checkpoint("phimoe", tmp_path, sliding_window=10)
    assert windows(path) == [10, 10]
    assert windows(path, max_model_len=10) == [None, None]
    assert greedy_tokens(path) == greedy_reference(path, PROMPTS, [12, 12])


def test_the_mask_decides_where_argument_and_mask_differ(tmp_path, monkeypatch):
    path = make_checkpoint("mistral", tmp_path)
    assert windows(path) == [20, 20]
    create = modeling_mistral.create_sliding_window_causal_mask
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", modeling_mistral.create_causal_mask)
    assert windows(path) == [None, None]

    def banded(*args, **kwargs):
        return create(*args, and_mask_function=lambda batch, head, query, key: key % 2 == query % 2, **kwargs)

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", banded)
    with pytest.raises(LoadError, match=r"position \d+ of 256 attends to others than those before it within a window"):
        windows(path)


def test_a_bias_that_a_model_adds_to_its_mask_is_refused(tmp_path, monkeypatch):
    path = make_checkpoint("llama", tmp_path)
    create = modeling_llama.create_causal_mask

    def biased(*args, **kwargs):
        mask = create(*args, **kwargs)
        return mask + torch.arange(mask.shape[-1]) * 0.1

    monkeypatch.setattr(modeling_llama, "create_causal_mask", biased)
    with pytest.raises(LoadError, match="'llama' is not supported: LlamaAttention computes an attention mask or bias"):
        windows(path)


def test_the_reason_names_the_place_in_the_models_code(tmp_path, monkeypatch):
    path = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: kwargs.get("none")["x"])
    with pytest.raises(
        LoadError, match=r"'NoneType' object is not subscriptable \(in forward, modeling_llama.py:\d+\)"
    ):
        windows(path)


def test_a_layer_that_attends_twice_is_refused_for_that_reason(tmp_path, monkeypatch):
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    model = loaded(path)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(LoadError, match="LlamaAttention is called more than once in a forward pass"):
        probe(model, model.config, 256, CPU)


def without_keeping(forward):
    def whole(self, *args, logits_to_keep=0, **kwargs):
        return forward(self, *args, **kwargs)

    return whole


def test_a_model_that_ignores_logits_to_keep_is_served(tmp_path, monkeypatch, caplog):
    path = make_checkpoint("llama", tmp_path)
    assert probed(path).keeps_logits
    expected = greedy_reference(path, PROMPTS, [12, 12])
    monkeypatch.setattr(
        modeling_llama.LlamaForCausalLM, "forward", without_keeping(modeling_llama.LlamaForCausalLM.forward)
    )
    assert not probed(path).keeps_logits
    assert greedy_tokens(path, native_forward=False) == expected
    assert "LlamaForCausalLM ignores logits_to_keep" in caplog.text
    core = make_core(path, native_forward=False)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    deltas = run(core, [PROMPTS[1]], [params])
    assert sum(len(delta.prompt_logprobs or ()) for delta in deltas[0, 0]) == len(PROMPTS[1])


def test_a_model_with_the_logits_of_other_tokens_is_refused(tmp_path, monkeypatch):
    path = make_checkpoint("llama", tmp_path)
    forward = modeling_llama.LlamaForCausalLM.forward

    def last(self, *args, logits_to_keep=0, **kwargs):
        return forward(self, *args, logits_to_keep=0 if isinstance(logits_to_keep, int) else 1, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", last)
    with pytest.raises(LoadError, match=r"with logits_to_keep=\[1\] it computes .* and not those of token 1"):
        probed(path)
    monkeypatch.setattr(
        modeling_llama.LlamaForCausalLM,
        "forward",
        lambda self, *a, **k: forward(self, *a, **{**k, "logits_to_keep": 1}),
    )
    with pytest.raises(LoadError, match=r"its logits have shape \[1, 1, 199\] for 3 tokens"):
        probed(path)


@pytest.mark.parametrize("model_type", ["afmoe", "jetmoe"])
def test_layers_that_view_the_output_of_their_attention_run(tmp_path, model_type):
    path = make_checkpoint(model_type, tmp_path)
    load(load_config(path))
    assert greedy_tokens(path) == greedy_reference(path, PROMPTS, [12, 12])
