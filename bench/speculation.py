"""Drafts on and off, side by side: tokens a second of one, 16 and 64 streams on texts that repeat themselves, and not.

    python bench/speculation.py [--streams 1 16 64] [--rounds 3] [--method suffix] [--output FILE]

The model copies by construction (make_copier.py) and has the size of a 60M llama.  A sampled token is another than the
copied one as often as the temperature says, and the text goes on from there.  Prompts are pieces of Python's standard
library, others in each round, so nothing is known from before.  Both sides must give the same tokens.

On a shared machine two runs of the same differ by 10% and more.  So both engines, each with a model of its own, run at
the same time and step in turns: next is the one with fewer tokens out, and each step counts for its engine.  In every
second round the two models change places, so where their memory lies is the same for both in the end.  The time within
the drafter is measured, too: where it has hardly drafted, its share of the run is what drafts have cost.
"""

from __future__ import annotations

import copy
import gc
import glob
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import common
import msgspec

from inflight.engine.assembly import make_core
from inflight.engine.drafting.adaptive_drafter import AdaptiveDrafter
from inflight.worker import settle_garbage_collector

VOCAB = 32000


class Work(NamedTuple):
    """Prompts of one kind: a text, and so many of its first tokens once more."""

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
    # A conversation that repeats a part: a quarter of the tokens are others.
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
    """Sums the seconds within the methods of the drafters of engines."""

    def __init__(self, engines: Iterable[Any]) -> None:
        self.seconds = 0.0
        for llm in engines:
            drafter = llm.core.scheduler.policies.drafter
            while not isinstance(drafter, AdaptiveDrafter):
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


class Run:
    """Requests of one engine that run together, step by step.

    Attributes:
        seconds: within its steps.
    """

    def __init__(self, llm: Any, prompts: list[list[int]], params: list[Any]) -> None:
        self._llm = llm
        requests = llm.engine.submit([(None, prompt) for prompt in prompts], params, lambda request: None)
        self._results = [request.result for request in requests]
        self.seconds = 0.0

    @property
    def tokens(self) -> list[list[int]]:
        return [result.outputs[0].token_ids for result in self._results]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def finished(self) -> bool:
        return all(result.finished for result in self._results)

    def step(self) -> None:
        start = time.perf_counter()
        self._llm.engine.step()
        self.seconds += time.perf_counter() - start


class Bench:
    """Two models, and for each of them an engine without drafts and one with."""

    def __init__(self, checkpoint: Path, method: str, dtype: str, threads: int) -> None:
        from inflight import LLM

        options = {"dtype": dtype, "kv_cache_memory": "1GiB", "cpu_threads": threads, "max_num_seqs": 64}
        options["enable_prefix_caching"] = False  # each engine writes to the blocks that are free to the other
        self.on = [LLM(str(checkpoint), **options, speculative_config={"method": method}) for _ in range(2)]
        self.off = [copy.copy(llm) for llm in self.on]
        for llm in self.off:
            llm.engine = copy.copy(llm.engine)
            llm.engine._open = {}
            llm.engine.core = make_core(msgspec.structs.replace(llm.config, speculative_config=None), llm.core.runner)
        self.texts = texts_of(checkpoint)
        self.watch = Stopwatch(self.on)
        settle_garbage_collector()

    def counts(self) -> list[int]:
        """Drafts, draft tokens, and accepted ones, so far."""
        engines = [llm.core.scheduler.policies.draft_counts.totals()[:3] for llm in self.on]
        return [sum(numbers) for numbers in zip(*engines)]

    def run(self, name: str, streams: int, tokens: int, number: int) -> dict[str, float]:
        """Output tokens a second of both sides, in a round of this number."""
        from inflight import SamplingParams

        work = WORKS[name]
        rng = random.Random(f"{name} {streams} {number}")
        prompts = [prompt(work, self.texts, rng) for _ in range(streams)]
        options = dict(temperature=work.temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)
        params = [SamplingParams(seed=rng.randrange(2**40), **options) for _ in prompts]
        place = number % 2
        sides = {"off": Run(self.off[place], prompts, params), "on": Run(self.on[1 - place], prompts, params)}
        gc.collect()
        for turn in itertools.count():
            going = [side for side in sides.values() if not side.finished]
            if not going:
                break
            min(going if turn % 2 else reversed(going), key=lambda side: side.num_tokens).step()
        assert sides["on"].tokens == sides["off"].tokens, f"{name}, {streams}: the tokens are not the same"
        return {name: streams * tokens / side.seconds for name, side in sides.items()}


def main() -> None:
    arguments = common.options(
        __doc__,
        works=common.choice(WORKS),
        streams=[1, 16, 64],
        rounds=3,
        tokens=192,
        method=common.choice(["suffix", "ngram"], "suffix"),
        dtype=common.choice(["bfloat16", "float32"], "float32"),
        threads=2,
    )
    bench = Bench(common.copier(), arguments.method, arguments.dtype, arguments.threads)
    runs: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    counts: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    for name in arguments.works:
        for streams in arguments.streams:
            key = f"{name}, {streams}"
            before = bench.counts()
            bench.run(name, streams, arguments.tokens, -2)  # warms up, and learns
            bench.run(name, streams, arguments.tokens, -1)
            bench.watch.seconds = 0.0
            for number in range(arguments.rounds):
                for side, rate in bench.run(name, streams, arguments.tokens, number).items():
                    runs.setdefault(f"{key}, {side}", []).append(round(rate, 1))
            on, off = runs[f"{key}, on"], runs[f"{key}, off"]
            ratios[key] = round(statistics.median(a / b for a, b in zip(on, off)), 3)
            shares[key] = round(bench.watch.seconds / sum(streams * arguments.tokens / rate for rate in on), 4)
            counts[key] = [now - then for now, then in zip(bench.counts(), before)]
            print(
                f"{key:<12} off {statistics.median(off):8.1f}  on {statistics.median(on):8.1f} tokens/s  "
                f"ratio {ratios[key]:.3f}  drafts, tokens, accepted {counts[key]}  drafter {shares[key]:.2%}",
                flush=True,
            )
    common.record(arguments, runs, ratios=ratios, drafts_tokens_accepted=counts, drafter_share=shares)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
