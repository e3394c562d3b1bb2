#!/usr/bin/env python3
"""Embeddings and a rerank on a CPU: texts/s of Inflight, transformers' padded batches, and other engines.

    python bench/pooling.py [--shape bert-base] [--texts 512] [--documents 100] [--rounds 3] [--output FILE]

The model has the shape of Qwen3-Embedding-0.6B, which embeds by its last token, or of BERT-base, which takes the mean;
with random weights.  Texts have 32 to 512 tokens, uniformly.  A rerank is one query of 128 tokens before each of the
documents, of 64 to 192 tokens: as a reranker sees it, but for the head.  The peers sort the texts by length and pad
batches of 16, at their best.  sentence-transformers and OpenVINO's TextEmbeddingPipeline take part if they are
installed (the latter with BERT's shape, and in float32): they get texts that have as many tokens.
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

SHAPES = {"qwen3-embedding-0.6b": "qwen3-0.6b-rand", "bert-base": "bert-base-rand"}
KINDS = {"qwen3-embedding-0.6b": "last", "bert-base": "mean"}
BATCH = 16
Prompts = list[list[int]]


def checkpoint(arguments: dict[str, Any]) -> str:
    return common.checkpoint(SHAPES[arguments["shape"]], arguments["dtype"])


def words(arguments: dict[str, Any]) -> list[int]:
    """Tokens of whole words: a text of such is tokenised to them."""
    vocabulary = json.loads((Path(checkpoint(arguments)) / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(token for entry, token in vocabulary.items() if entry.startswith("\u0120") and entry[1:].isalpha())


def texts(known: list[int], count: int) -> Prompts:
    rng = random.Random(7)
    return [rng.choices(known, k=rng.randint(32, 512)) for _ in range(count)]


def rerank(known: list[int], count: int) -> Prompts:
    rng = random.Random(11)
    query = rng.choices(known, k=128)
    return [[*query, *rng.choices(known, k=rng.randint(64, 192))] for _ in range(count)]


def inflight(arguments: dict[str, Any]) -> Callable[[Prompts], int]:
    from inflight.engine.attached import Attached
    from inflight.engine.messages import AddRequest
    from inflight.engine.pooling import Pooling
    from inflight.frontend.request.pooled_request import void_params

    options = {
        "model": checkpoint(arguments),
        "dtype": arguments["dtype"],
        "cpu_threads": arguments["threads"],
        "kv_cache_memory": "2GiB",
        "max_model_len": 512 if arguments["shape"] == "bert-base" else 2048,
        "max_queue_size": 0,
    }
    core = common.engine(options)
    attached = Attached(pooling=Pooling("embed", KINDS[arguments["shape"]]))

    def embed(prompts: Prompts) -> int:
        for number, prompt in enumerate(prompts):
            refused = core.add_request(AddRequest(number, prompt, void_params(), attached=attached))
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
    model = AutoModel.from_pretrained(checkpoint(arguments), dtype=getattr(torch, arguments["dtype"])).eval()
    is_mean = KINDS[arguments["shape"]] == "mean"
    options = {} if is_mean else {"use_cache": False}

    @torch.inference_mode()
    def embed(prompts: Prompts) -> int:
        ordered, count = sorted(prompts, key=len), 0
        for start in range(0, len(ordered), BATCH):
            batch = ordered[start : start + BATCH]
            longest = len(batch[-1])
            pad = [[0] * (longest - len(prompt)) for prompt in batch]
            rows = [prompt + zeros if is_mean else zeros + prompt for prompt, zeros in zip(batch, pad)]
            ones = [[1] * len(prompt) for prompt in batch]
            mask = torch.tensor([one + zeros if is_mean else zeros + one for one, zeros in zip(ones, pad)])
            hidden = model(input_ids=torch.tensor(rows), attention_mask=mask, **options).last_hidden_state.float()
            weights = mask[..., None].float()
            pooled = (hidden * weights).sum(1) / weights.sum(1) if is_mean else hidden[:, -1]
            count += len(torch.nn.functional.normalize(pooled, dim=1))
        return count

    return embed


def sentence_transformers(arguments: dict[str, Any]) -> Callable[[Prompts], int]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(arguments["threads"])
    path = Path(checkpoint(arguments))
    folder = Path(tempfile.mkdtemp(prefix="bench-pooling-"))
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (place, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    mode = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}[KINDS[arguments["shape"]]]
    for place, content in (("1_Pooling", {"word_embedding_dimension": size, mode: True}), ("2_Normalize", {})):
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(content))
    dtype = getattr(torch, arguments["dtype"])
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})

    def embed(prompts: Prompts) -> int:
        given = [model.tokenizer.decode(prompt) for prompt in prompts]
        return len(model.encode(given, batch_size=BATCH, convert_to_numpy=True))

    return embed


def openvino(arguments: dict[str, Any]) -> Callable[[Prompts], int]:
    import openvino
    import openvino_genai
    import torch
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoModel, AutoTokenizer

    path = checkpoint(arguments)
    folder = Path(tempfile.mkdtemp(prefix="bench-pooling-"))
    (folder / "config.json").write_text((Path(path) / "config.json").read_text())
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    converted = openvino.convert_model(model, example_input=example)
    tokenizer = AutoTokenizer.from_pretrained(path)
    openvino.save_model(converted, folder / "openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(convert_tokenizer(tokenizer), folder / "openvino_tokenizer.xml")
    config = openvino_genai.TextEmbeddingPipeline.Config()
    config.pooling_type = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN
    config.normalize = True
    precision = {"float32": "f32", "bfloat16": "bf16"}[arguments["dtype"]]
    options = {"INFERENCE_NUM_THREADS": arguments["threads"], "INFERENCE_PRECISION_HINT": precision}
    pipeline = openvino_genai.TextEmbeddingPipeline(folder, "CPU", config, **options)

    def embed(prompts: Prompts) -> int:
        given, count = sorted((tokenizer.decode(prompt) for prompt in prompts), key=len), 0
        for start in range(0, len(given), BATCH):
            count += len(pipeline.embed_documents(given[start : start + BATCH]))
        return count

    return embed


SIDES = {
    "inflight": inflight,
    "transformers": transformers_batches,
    "sentence-transformers": sentence_transformers,
    "openvino-genai": openvino,
}


def run(side: str, arguments: dict[str, Any]) -> dict[str, Any]:
    embed = SIDES[side](arguments)
    embed([[5] * 40, [6] * 300])  # tokens of no prompt that is timed: none finds a prefix
    found: dict[str, Any] = {}
    known = words(arguments)
    workload = {"texts": texts(known, arguments["texts"]), "rerank": rerank(known, arguments["documents"])}
    for name, prompts in workload.items():
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
        shape=common.choice(SHAPES, "qwen3-embedding-0.6b"),
        texts=512,
        documents=100,
        rounds=3,
        dtype=common.choice(["bfloat16", "float32"], "bfloat16"),
        threads=os.cpu_count(),
    )
    arguments = {name: getattr(args, name) for name in ("shape", "texts", "documents", "dtype", "threads")}
    checkpoint(arguments)
    shown = lambda found: f"{found['texts_per_second']:.2f} texts/s, {found['rerank_per_second']:.2f} documents/s"  # noqa: E731
    sides = [side for side in args.sides if side != "openvino-genai" or args.shape == "bert-base"]
    runs = common.alternate(
        sides, args.rounds, lambda side, _: common.in_fresh_process(__file__, side, arguments), shown
    )
    figures = ("texts_per_second", "rerank_per_second")
    ratios = {
        side: {name: common.median_ratio(runs["inflight"], runs[side], name) for name in figures}
        for side in runs
        if side != "inflight" and "inflight" in runs
    }
    print(f"\n{common.machine()}, {args.shape}, {args.dtype}, {args.threads} threads, medians of {args.rounds} runs")
    for side, values in common.medians(runs, *figures).items():
        print(f"  {side:<22} {values['texts_per_second']:8.2f} texts/s {values['rerank_per_second']:8.2f} documents/s")
    for side, ratio in ratios.items():
        print(f"  inflight / {side}: {ratio['texts_per_second']:.2f} and {ratio['rerank_per_second']:.2f}")
    common.record(args, runs, ratios=ratios)


if __name__ == "__main__":
    main()
