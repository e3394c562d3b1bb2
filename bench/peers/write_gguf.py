"""A checkpoint with the architecture of Qwen3 or a llama as a GGUF file in 16 bits: `python write_gguf.py FOLDER FILE`.

`llama-quantize FILE OUTPUT Q4_0` then makes its other types.  The vocabulary is a numbering: engines that are timed get
token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file


def write(folder: Path, file: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("qwen3", "llama"):
        raise SystemExit(f"{folder} has the architecture {kind}; this script converts qwen3 and llama only")
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [f"<{index}>" for index in range(config["vocab_size"] - 1)]
    writer.add_token_list([*tokens, tokens[0] + tokens[1]])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_rope_dimension_count(config["head_dim"])
    arch = gguf.MODEL_ARCH.QWEN3 if kind == "qwen3" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        rotated = next((count for ending, count in heads.items() if name.endswith(ending)), None)
        if kind == "llama" and rotated is not None:  # llama.cpp rotates neighbours, transformers the halves of a head
            halves = weight.reshape(rotated, 2, config["head_dim"] // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape).contiguous()
        dtype = torch.float32 if weight.ndim == 1 else torch.float16
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.to(dtype).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    write(args.folder, args.file)
