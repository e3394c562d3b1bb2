"""Trains a small llama that copies and quotes, and pads it to the size of a larger one, in some ten minutes.

    python bench/make_copier.py OUT [--minutes 8]

Two layers learn to go on as the text went on before (induction heads, Olsson et al., arXiv:2209.11895): the training
text is random tokens with pieces that come again.  Then the same function is written into the shape of
`llama-60m-rand` of make_checkpoints.py: what is added in width and depth is computed and contributes nothing, so a step
costs what it costs there.  The tokenizer is the demo model's.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).parents[1] / "model_repository" / "demo" / "1" / "checkpoint"
VOCAB, HIDDEN, LAYERS, HEAD = 2560, 256, 2, 64
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8}
LENGTHS, BATCH = (48, 96, 192, 256), 32  # short texts first: what is copied is near


def config(tied: bool, **shape: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        head_dim=HEAD,
        num_key_value_heads=shape["num_attention_heads"],
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        **shape,
    )


def batch(generator: torch.Generator, length: int) -> Tensor:
    """Random tokens in which a piece comes again and again, and now and then a token is another."""
    rows = []
    for _ in range(BATCH):
        period = int(torch.randint(8, length // 2, (), generator=generator))
        start = int(torch.randint(0, 16, (), generator=generator))
        piece = torch.randint(3, VOCAB, (period,), generator=generator)
        row = torch.cat([torch.randint(3, VOCAB, (start,), generator=generator), piece.repeat(length // period + 1)])
        rows.append(row[: length + 1])
    tokens = torch.stack(rows)
    other = torch.randint(3, VOCAB, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.02, other, tokens)


def train(seconds: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    # What it copies goes out through the matrix that it came in by: tied, it learns in a tenth of the steps.
    small = config(
        True, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // HEAD
    )
    model = LlamaForCausalLM(small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    start, step = time.monotonic(), 0
    while (spent := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 100, 4 * (1 - spent / seconds) + 0.05)
        tokens = batch(generator, LENGTHS[min(len(LENGTHS) - 1, int(len(LENGTHS) * spent / seconds))])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            tail = tokens.shape[1] // 2
            right = (logits[:, tail:].argmax(-1) == tokens[:, tail + 1 :]).float().mean()
            print(f"{spent:5.0f} s  step {step:5d}  loss {loss.item():.3f}  copied {right.item():.3f}", flush=True)
        step += 1
    return model


@torch.no_grad()
def padded(small: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same function in the shape of `LARGE`: zeros where the small model has nothing."""
    large = LlamaForCausalLM(config(False, **LARGE))
    scale = (HIDDEN / LARGE["hidden_size"]) ** 0.5  # the norm divides by the mean over all channels
    found = small.state_dict()
    for name, parameter in large.state_dict().items():
        values = found.get(name if name != "lm_head.weight" else "model.embed_tokens.weight")
        is_norm = "norm" in name
        parameter.normal_(0.0, 0.02)  # inputs of what is multiplied by zeros: they cost time and change nothing
        if values is None:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            continue
        if not is_norm:
            parameter.zero_()
        parameter[tuple(slice(size) for size in values.shape)] = values * scale if is_norm else values
        if is_norm:
            parameter[values.shape[0] :] = 0.0
    return large


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    small = train(60 * arguments.minutes)
    large = padded(small)
    tokens = batch(torch.Generator().manual_seed(2), 200)
    with torch.no_grad():
        difference = (small(input_ids=tokens).logits - large(input_ids=tokens).logits).abs().max()
    print(f"largest difference of a logit after padding: {difference:.2e}")
    large.save_pretrained(arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, arguments.out)


if __name__ == "__main__":
    main()
