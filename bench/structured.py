#!/usr/bin/env python3
"""The cost of structured output: throughput, masks, and the first token of a new schema.

    python bench/structured.py [--model demo|60m] [--quantization int8] [--rows 32] [--tokens 128] [--rounds 5]
        [--output FILE]

`plain` and `constrained` generate the same number of tokens in as many rows, in one process and in turn: the
constrained rows write JSON of a schema that does not end before `--tokens`.  These models have not learned that: most
tokens that they choose are refused.  `drafts off` is the same without forced tokens.  `all allowed` is the other end, a
model that writes what the grammar says: a regex that matches any text.

Rates tell little on a machine that does other work.  `cpu_ratio` is the CPU time of a plain run over that of the run
next to it, all threads of the process together: the median, least and largest of the rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import common
import numpy as np

from inflight.engine.held_requests import HELD_POLL_SECONDS
from inflight.grammars.base import MaskJob, mask_words
from inflight.grammars.spec import GrammarSpec
from inflight.worker import settle_garbage_collector

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["book", "film", "play"]},
        "year": {"type": "integer", "minimum": 1500, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "kind", "year", "tags"],
    "additionalProperties": False,
}
ANY_TEXT = GrammarSpec("regex", "(?s:.*)")


def schema(number: int = 0) -> GrammarSpec:
    """An endless list; schemas with different numbers are different."""
    text = json.dumps({"type": "array", "items": ITEM, "minItems": 500 + number})
    return GrammarSpec("json_schema", text, "")


class Bench:
    def __init__(
        self, model: str, rows: int, tokens: int, dtype: str, threads: int, quantization: str | None = None
    ) -> None:
        path = str(common.DEMO) if model == "demo" else common.checkpoint(dtype=dtype)
        self.rows, self.tokens = rows, tokens
        sizes = {"max_num_seqs": rows, "max_model_len": 1024, "cpu_threads": threads}
        self.core = common.engine(
            {"model": path, "device": "cpu", "dtype": dtype, "quantization": quantization, **sizes}
        )
        self._drafter = self.core.scheduler.policies.drafter
        self._next_id = 0

    def _add(self, grammar: GrammarSpec | None, max_tokens: int, seed: int) -> None:
        prompt = [5, 6, 7, seed % 100 + 8]
        common.add(self.core, self._next_id, prompt, max_tokens=max_tokens, seed=seed, temperature=1.0, grammar=grammar)
        self._next_id += 1

    def throughput(self, grammar: GrammarSpec | None, drafts: bool = True) -> tuple[float, float]:
        """Tokens a second, and seconds of CPU time."""
        self.core.scheduler.policies.drafter = self._drafter if drafts else None
        for row in range(self.rows):
            self._add(grammar, self.tokens, row)
        start = time.process_time()
        run = common.timed(lambda: common.drain(self.core))
        assert run["tokens"] == self.rows * self.tokens
        return run["tokens_per_second"], time.process_time() - start

    def first_token(self, grammar: GrammarSpec | None) -> float:
        """Milliseconds from arrival to the first token of a lone request."""
        start = time.perf_counter()
        self._add(grammar, 1, 1)
        while not self.core.step().deltas:
            time.sleep(HELD_POLL_SECONDS)  # as the engine process does while a request is held
        return 1e3 * (time.perf_counter() - start)

    def masks(self) -> tuple[float, float]:
        """Median and 99th percentile of a mask along seeded outputs, in microseconds."""
        info, times = self.core.info, []
        assert info.grammars is not None
        bitmask = np.empty((1, mask_words(info.vocab_size)), dtype=np.int32)
        rng = np.random.default_rng(0)
        for _ in range(8):
            sequence = info.grammars.new(schema())
            for _ in range(60):
                start = time.perf_counter()
                info.grammars.fill([MaskJob(sequence, 0, [])], bitmask)
                times.append(1e6 * (time.perf_counter() - start))
                bits = np.unpackbits(bitmask.view(np.uint8), count=info.vocab_size, bitorder="little")
                sequence.advance([int(rng.choice(np.flatnonzero(bits)))])
        return float(np.median(times)), float(np.percentile(times, 99))


def cpu_ratio(plain: list[tuple[float, float]], others: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [one / other for (_, one), (_, other) in zip(plain, others)]
    return {
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
    }


def main() -> None:
    model, dtype = common.choice(["demo", "60m"], "demo"), common.choice(["bfloat16", "float32"], "float32")
    arguments = common.options(
        __doc__, model=model, rows=32, tokens=128, rounds=5, dtype=dtype, threads=2, quantization=""
    )
    bench = Bench(
        arguments.model,
        arguments.rows,
        arguments.tokens,
        arguments.dtype,
        arguments.threads,
        arguments.quantization or None,
    )
    runs: dict[str, list[tuple[float, float]]] = {"plain": [], "constrained": [], "drafts off": [], "all allowed": []}
    bench.throughput(None)
    bench.throughput(schema())
    settle_garbage_collector()  # as the engine process does
    for _ in range(arguments.rounds):
        runs["plain"].append(bench.throughput(None))
        runs["constrained"].append(bench.throughput(schema()))
        runs["drafts off"].append(bench.throughput(schema(), drafts=False))
        runs["all allowed"].append(bench.throughput(ANY_TEXT))
    sides = {side: [rate for rate, _ in found] for side, found in runs.items()}
    medians = {side: statistics.median(runs) for side, runs in sides.items()}
    plain = [bench.first_token(None) for _ in range(20)]
    new = [bench.first_token(schema(number)) for number in range(1, 21)]
    mask, slowest = bench.masks()
    result: dict[str, Any] = {
        "model": arguments.model,
        "rows": arguments.rows,
        "tokens_per_second": {side: [round(run, 1) for run in runs] for side, runs in sides.items()},
        "ratio": {side: round(medians[side] / medians["plain"], 3) for side in sides},
        "cpu_ratio": {side: cpu_ratio(runs["plain"], found) for side, found in runs.items()},
        "mask_us": {"median": round(mask, 1), "p99": round(slowest, 1)},
        "first_token_ms": {"plain": round(statistics.median(plain), 2), "new schema": round(statistics.median(new), 2)},
        "schema_bytes": schema().size,
    }
    print(json.dumps(result, indent=1))
    common.record(arguments, result.pop("tokens_per_second"), **result)


if __name__ == "__main__":
    main()
