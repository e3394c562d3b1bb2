"""sentence-transformers' `encode`, which sorts the texts by length and pads batches, for `bench/pooling.py`."""

from __future__ import annotations

from typing import Any

import embed_job
import torch
from sentence_transformers import SentenceTransformer


def load(task: dict[str, Any]) -> tuple[SentenceTransformer, int]:
    torch.set_num_threads(task["threads"])
    options = {"dtype": getattr(torch, task["dtype"])}
    return SentenceTransformer(task["folder"], device="cpu", model_kwargs=options), task["batch"]


def embed(engine: tuple[SentenceTransformer, int], texts: list[str]) -> Any:
    model, batch = engine
    return model.encode(texts, batch_size=batch, convert_to_numpy=True)


if __name__ == "__main__":
    embed_job.run(["sentence-transformers", "torch", "transformers"], load, embed)
