"""Writes a llama that copies: its weights are set by hand, so that it goes on as its text went on before.

    python bench/make_copier.py OUT

The shape is about that of `llama-60m-rand` of make_checkpoints.py, whose tokenizer it has.  Two layers are an induction
circuit (Olsson et al., arXiv:2209.11895): the first notes at each position the four tokens before it, the second looks
for the positions whose notes are most like the last four tokens, and takes the token there.  So it finds back after an
odd token.  The other six layers are computed and contribute nothing.  How often a sample is another token than the
copied one is a matter of temperature: 0.3% at 0.8, 1% at 0.85, 8% at 1, 40% at 1.2.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from make_checkpoints import make_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 32000, 512, 8, 4, 2, 128
CODE = 80  # channels of a token's code
NOTES = 4
# Where in the hidden state: the token, then those before it, the closest first; what comes next; and a constant.
PLACES = [CODE * note for note in range(1 + NOTES)]
NEXT, ONE = CODE * (1 + NOTES), CODE * (2 + NOTES)
THETA = 1e24  # few pairs of a head turn at all; the others compare contents at any distance
TURNING = 20  # pairs that tell neighbours apart; the others are for contents
NEIGHBOUR = 15.0  # how sharp a head looks at a neighbour
LIKENESS = 36.0  # how sharp it looks for contents
CERTAINTY = 14.0  # logit of a copied token


def write_layers(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    state: dict[str, Tensor] = model.state_dict()
    for name, values in state.items():
        if "norm" in name:
            values.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()
        else:
            values.normal_(0.0, 0.02, generator=generator)
    codes = torch.nn.functional.normalize(torch.randn(VOCAB, CODE, generator=generator), dim=1)
    embeddings = state["model.embed_tokens.weight"]
    embeddings.zero_()
    embeddings[:, :CODE], embeddings[:, ONE] = codes, 1.0

    def weights(layer: int, name: str) -> Tensor:
        return state[f"model.layers.{layer}.self_attn.{name}_proj.weight"]

    # Channels are divided by their root mean square first: the codes that are there by then, and the constant.
    first, second, last = (math.sqrt(parts / HIDDEN) for parts in (2, 2 + NOTES, 3 + NOTES))
    turns = THETA ** (-torch.arange(TURNING) / (HEAD // 2))
    queries, keys = weights(0, "q"), weights(0, "k")
    queries.zero_()
    keys.zero_()
    values = weights(0, "v")
    values.zero_()
    for kv_head in range(KV_HEADS):
        start = kv_head * HEAD
        keys[start : start + TURNING, ONE] = NEIGHBOUR * first
        values[start : start + CODE, :CODE] = torch.eye(CODE) * first
    for head in range(NOTES):
        start, place, angles = head * HEAD, PLACES[1 + head], (head + 1) * turns
        queries[start : start + TURNING, ONE] = NEIGHBOUR * first * torch.cos(angles)
        queries[start + HEAD // 2 : start + HEAD // 2 + TURNING, ONE] = -NEIGHBOUR * first * torch.sin(angles)
        weights(0, "o")[place : place + CODE, start : start + CODE] = torch.eye(CODE)

    queries, keys, values = weights(1, "q"), weights(1, "k"), weights(1, "v")
    queries.zero_()
    keys.zero_()
    values.zero_()
    free = [*range(TURNING, HEAD // 2), *range(HEAD // 2 + TURNING, HEAD)]
    size = len(free) // NOTES
    for note in range(NOTES):
        some = LIKENESS * second * torch.linalg.qr(torch.randn(CODE, size, generator=generator))[0].T
        rows = free[note * size : (note + 1) * size]
        queries[rows, PLACES[note] : PLACES[note] + CODE] = some
        keys[rows, PLACES[note + 1] : PLACES[note + 1] + CODE] = some
    values[:CODE, :CODE] = torch.eye(CODE) * second
    weights(1, "o")[NEXT : NEXT + CODE, :CODE] = torch.eye(CODE)

    output = state["lm_head.weight"]
    output.zero_()
    output[:, NEXT : NEXT + CODE] = CERTAINTY * last * codes


@torch.no_grad()
def make(out: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            **dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=1536, num_hidden_layers=LAYERS),
            **dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD),
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            **dict(tie_word_embeddings=False, bos_token_id=1, eos_token_id=2),
        )
    )
    write_layers(model, torch.Generator().manual_seed(0))
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
