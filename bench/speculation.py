"""Drafts on and off, side by side: tokens a second of one, 16 and 64 streams on texts that repeat themselves, and not.

    python bench/speculation.py [--streams 1 16 64] [--rounds 3] [--method suffix] [--output FILE]

The model copies by construction (make_copier.py) and has the size of a 60M llama.  A sampled token is another than the
copied one as often as the temperature says, and the text goes on from there.  Prompts are pieces of Python's standard
library, others in each round, so nothing is known from before.  Both sides must give the same tokens.

Single runs differ by 10% and more on a shared machine.  So the time within the drafter is measured, too: where it has
hardly drafted, its share of the run is what drafts have cost.
"""

from __future__ import annotations

import argparse
import copy
import glob
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import make_copier
import msgspec

from inflight.engine.core import EngineCore
from inflight.engine.drafting.thrifty import ThriftyDrafter

VOCAB = 32000


class Work(NamedTuple):
    """Prompts of one kind: a text, of which so many of its first tokens stand behind it again."""

    temperature: float
    prompt: int
    begun: int
    real_text: bool = True
    turns: int = 1


WORKS = {
    # Code, and an edited copy of it: some 1% of its tokens are others.
    "edit": Work(0.85, 300, 20),
    # An answer that quotes a document in pieces: some 8% of its tokens are others.
    "quote": Work(1.0, 600, 8),
    # A conversation of which a part is said again: a quarter of the tokens are others.
    "chat": Work(1.1, 200, 8, turns=3),
    # Text that hardly repeats: what is sampled is almost free.
    "free": Work(1.5, 300, 0),
    "random": Work(4.0, 300, 0, real_text=False),
}


def texts_of(checkpoint: Path) -> list[list[int]]:
    """Tokens of the standard library's files, of those with enough."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    folder = Path(os.path.dirname(os.__file__))
    files = sorted(glob.glob(str(folder / "*.py")))[:60]
    found = [tokenizer.encode(Path(file).read_text(errors="ignore")).ids for file in files]
    return [ids for ids in found if len(ids) > 2000]


def prompt(work: Work, texts: list[list[int]], rng: random.Random) -> list[int]:
    if not work.real_text:
        return [rng.randrange(10, VOCAB) for _ in range(work.prompt)]
    text = rng.choice(texts)
    start = rng.randrange(len(text) - work.prompt)
    piece = text[start : start + work.prompt]
    turns = list(piece)
    for _ in range(work.turns - 1):  # said again, with a tenth of its tokens changed
        turns += [token if rng.random() > 0.1 else rng.randrange(10, VOCAB) for token in piece]
    return turns + piece[: work.begun]


class Stopwatch:
    """Sums the seconds within the methods of the drafter of an engine, from now on."""

    def __init__(self, llm: Any) -> None:
        self.seconds = 0.0
        drafter = llm.core.scheduler.policies.drafter
        while not isinstance(drafter, ThriftyDrafter):
            drafter = drafter._inner
        for name in ("begin", "propose", "observe", "step_took", "ended"):
            setattr(drafter, name, self._timed(getattr(drafter, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class Bench:
    """One engine without drafts and one with, in turns on one model: where its memory lies is the same for both."""

    def __init__(self, checkpoint: Path, method: str, dtype: str, threads: int) -> None:
        from inflight import LLM

        options = {"dtype": dtype, "kv_cache_memory": "1GiB", "cpu_threads": threads, "max_num_seqs": 64}
        options["enable_prefix_caching"] = False  # each engine writes to the blocks that are free to the other
        on = LLM(str(checkpoint), **options, speculative_config={"method": method})
        off = copy.copy(on)
        off.core = EngineCore(msgspec.structs.replace(on.config, speculative_config=None), on.core.runner)
        self.sides = {"off": off, "on": on}
        self.texts = texts_of(checkpoint)
        self.watch = Stopwatch(self.sides["on"])

    def run(self, side: str, name: str, streams: int, tokens: int, round_number: int) -> tuple[float, Any]:
        from inflight import SamplingParams

        work = WORKS[name]
        rng = random.Random(f"{name} {streams} {round_number}")
        prompts = [prompt(work, self.texts, rng) for _ in range(streams)]
        params = [
            SamplingParams(
                temperature=work.temperature,
                seed=rng.randrange(2**40),
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for _ in prompts
        ]
        llm = self.sides[side]
        start = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        seconds = time.perf_counter() - start
        return streams * tokens / seconds, [result.outputs[0].token_ids for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--method", default="suffix", choices=["suffix", "ngram"])
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    checkpoint = common.CACHE / "llama-60m-copier"
    if not checkpoint.exists():
        make_copier.make(checkpoint)
    bench = Bench(checkpoint, arguments.method, arguments.dtype, arguments.threads)
    runs: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    counts: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    totals = bench.sides["on"].core.scheduler.policies.draft_counts
    for name in arguments.works:
        for streams in arguments.streams:
            key = f"{name}, {streams}"
            before, seconds = totals.totals()[:3], 0.0
            for number in range(-1, arguments.rounds):  # the first one warms up, and learns
                found = {}
                for side in ("off", "on") if number % 2 else ("on", "off"):
                    rate, found[side] = bench.run(side, name, streams, arguments.tokens, number)
                    if number < 0:
                        bench.watch.seconds = 0.0
                    else:
                        seconds += streams * arguments.tokens / rate if side == "on" else 0.0
                        runs.setdefault(f"{key}, {side}", []).append(round(rate, 1))
                assert found["on"] == found["off"], f"{key}: the tokens are not the same"
            on, off = runs[f"{key}, on"], runs[f"{key}, off"]
            ratios[key] = round(statistics.median(a / b for a, b in zip(on, off)), 3)
            shares[key] = round(bench.watch.seconds / seconds, 4)
            counts[key] = [now - then for now, then in zip(totals.totals()[:3], before)]
            print(
                f"{key:<12} off {statistics.median(off):8.1f}  on {statistics.median(on):8.1f} tokens/s  "
                f"ratio {ratios[key]:.3f}  drafts, tokens, accepted {counts[key]}  drafter {shares[key]:.2%}",
                flush=True,
            )
    options = {key: value for key, value in vars(arguments).items() if key != "output"}
    common.record(arguments.output, runs, options, ratios=ratios, drafts_tokens_accepted=counts, drafter_share=shares)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
