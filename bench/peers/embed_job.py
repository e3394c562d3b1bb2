"""The job of a run of `bench/pooling.py`, for the scripts `embed_NAME.py`: `python embed_NAME.py JOB.json`.

The job has: `folder` (a checkpoint in sentence-transformers' layout, or what it was converted to), `dtype`, `threads`,
`batch` (texts of a padded batch), `warm_up` (texts), `work` (name -> texts), `compared` (texts whose vectors are part
of the result), `options` (of the engine) and `result` (the file to write).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import job

Embed = Callable[[Any, list[str]], list[list[float]]]


def run(packages: list[str], load: Callable[[dict[str, Any]], Any], embed: Embed) -> None:
    """Load, warm up, time the texts of each name, and write the result.

    Args:
        packages: distributions whose versions are recorded.
        load: job -> engine, ready for texts.
        embed: engine, texts -> their vectors, in the order of the texts; all are given at once.
    """
    task = job.read()
    engine = load(task)
    embed(engine, task["warm_up"])
    figures: dict[str, Any] = {}
    for name, texts in task["work"].items():
        start, busy = time.perf_counter(), job.cpu_seconds()
        vectors = embed(engine, texts)
        figures[f"{name}_seconds"] = time.perf_counter() - start
        figures[f"{name}_cpu_seconds"] = job.cpu_seconds() - busy
        figures[f"{name}_per_second"] = len(texts) / figures[f"{name}_seconds"]
        assert len(vectors) == len(texts), f"{len(texts)} texts, {len(vectors)} vectors"
    vectors = [list(map(float, vector)) for vector in embed(engine, task["compared"])]
    job.write({**figures, "vectors": vectors, "versions": {name: version(name) for name in packages}})


def in_batches(embed: Embed, engine: Any, texts: list[str], batch: int) -> list[list[float]]:
    """For an engine that pads the texts of a call: sorted by length, in batches; vectors in the order of the texts."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors: list[list[float]] = [[]] * len(texts)
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        for place, vector in zip(places, embed(engine, [texts[place] for place in places])):
            vectors[place] = vector
    return vectors
