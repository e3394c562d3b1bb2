#!/usr/bin/env python3
"""Embeddings and a rerank on a CPU: texts/s of Inflight, transformers' padded batches, and sentence-transformers.

    python bench/pooling.py [--texts 512] [--documents 100] [--rounds 3] [--dtype bfloat16] [--output FILE]

The model has the shape of Qwen3-Embedding-0.6B, with random weights.  Texts have 32 to 512 tokens, uniformly; each is
embedded by its last token.  A rerank is one query of 128 tokens before each of the documents, of 64 to 192 tokens: as a
reranker sees it, but for the head.  The peers sort the texts by length and pad batches of 16, at their best.
sentence-transformers takes part if it is installed.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common

SHAPE = "qwen3-0.6b-rand"
BATCH = 16
Prompts = list[list[int]]


def texts(count: int) -> Prompts:
    rng = random.Random(7)
    return [[rng.randrange(100, 30_000) for _ in range(rng.randint(32, 512))] for _ in range(count)]


def rerank(count: int) -> Prompts:
    rng = random.Random(11)
    query = [rng.randrange(100, 30_000) for _ in range(128)]
    return [[*query, *(rng.randrange(100, 30_000) for _ in range(rng.randint(64, 192)))] for _ in range(count)]


def inflight(arguments: dict[str, Any]) -> Callable[[Prompts], int]:
    from inflight.engine.attached import Attached
    from inflight.engine.messages import AddRequest
    from inflight.engine.pooling import Pooling
    from inflight.frontend.request.pooled_request import void_params

    options = {
        "model": common.checkpoint(SHAPE, arguments["dtype"]),
        "dtype": arguments["dtype"],
        "cpu_threads": arguments["threads"],
        "kv_cache_memory": "2GiB",
        "max_model_len": 2048,
        "max_queue_size": 0,
    }
    core = common.engine(options)

    def embed(prompts: Prompts) -> int:
        for number, prompt in enumerate(prompts):
            message = AddRequest(number, prompt, void_params(), attached=Attached(pooling=Pooling("embed")))
            refused = core.add_request(message)
            assert refused is None, refused
        count = 0
        while core.has_work:
            count += sum(delta.pooled is not None for delta in core.step().deltas)
        return count

    return embed


def transformers_batches(arguments: dict[str, Any]) -> Callable[[Prompts], int]:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(arguments["threads"])
    path = common.checkpoint(SHAPE, arguments["dtype"])
    model = AutoModel.from_pretrained(path, dtype=getattr(torch, arguments["dtype"])).eval()

    @torch.inference_mode()
    def embed(prompts: Prompts) -> int:
        ordered, count = sorted(prompts, key=len), 0
        for start in range(0, len(ordered), BATCH):
            batch = ordered[start : start + BATCH]
            longest = len(batch[-1])
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])  # the last token is last
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
            hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -1]
            count += len(torch.nn.functional.normalize(hidden.float(), dim=1))
        return count

    return embed


def sentence_transformers(arguments: dict[str, Any]) -> Callable[[Prompts], int]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(arguments["threads"])
    path = Path(common.checkpoint(SHAPE, arguments["dtype"]))
    folder = Path(tempfile.mkdtemp(prefix="bench-pooling-"))
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (place, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 1024, "pooling_mode_lasttoken": True}
    for place, content in (("1_Pooling", pooling), ("2_Normalize", {})):
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(content))
    dtype = getattr(torch, arguments["dtype"])
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})

    def embed(prompts: Prompts) -> int:
        # It takes texts: as many tokens as the prompt has, a tokenizer's work included.
        given = [model.tokenizer.decode(prompt) for prompt in prompts]
        return len(model.encode(given, batch_size=BATCH, convert_to_numpy=True))

    return embed


SIDES = {"inflight": inflight, "transformers": transformers_batches, "sentence-transformers": sentence_transformers}


def run(side: str, arguments: dict[str, Any]) -> dict[str, Any]:
    embed = SIDES[side](arguments)
    embed([[5] * 40, [6] * 300])  # tokens of no prompt that is timed: none finds a prefix
    found: dict[str, Any] = {}
    for name, prompts in (("texts", texts(arguments["texts"])), ("rerank", rerank(arguments["documents"]))):
        timed = common.timed(lambda prompts=prompts: embed(prompts))  # type: ignore[misc]
        found[f"{name}_seconds"] = timed["seconds"]
        found[f"{name}_per_second"] = len(prompts) / timed["seconds"]
    return found


def main() -> None:
    if common.ran_side(run):
        return
    known = [side for side in SIDES if find_spec(side.replace("-", "_")) is not None]
    args = common.options(
        __doc__,
        sides=common.choice(known),
        texts=512,
        documents=100,
        rounds=3,
        dtype=common.choice(["bfloat16", "float32"], "bfloat16"),
        threads=os.cpu_count(),
    )
    arguments = {name: getattr(args, name) for name in ("texts", "documents", "dtype", "threads")}
    common.checkpoint(SHAPE, args.dtype)
    shown = lambda found: f"{found['texts_per_second']:.2f} texts/s, {found['rerank_per_second']:.2f} documents/s"  # noqa: E731
    runs = common.alternate(
        args.sides, args.rounds, lambda side, _: common.in_fresh_process(__file__, side, arguments), shown
    )
    figures = ("texts_per_second", "rerank_per_second")
    ratios = {
        side: {name: common.median_ratio(runs["inflight"], runs[side], name) for name in figures}
        for side in runs
        if side != "inflight" and "inflight" in runs
    }
    print(f"\n{common.machine()}, {args.dtype}, {args.threads} threads, medians of {args.rounds} runs")
    for side, values in common.medians(runs, *figures).items():
        print(f"  {side:<22} {values['texts_per_second']:8.2f} texts/s {values['rerank_per_second']:8.2f} documents/s")
    for side, ratio in ratios.items():
        print(f"  inflight / {side}: {ratio['texts_per_second']:.2f} and {ratio['rerank_per_second']:.2f}")
    common.record(args, runs, ratios=ratios)


if __name__ == "__main__":
    main()
