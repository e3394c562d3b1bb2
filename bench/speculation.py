"""Drafts on and off, side by side: tokens a second of one, 16 and 64 streams on texts that repeat themselves, and not.

    python bench/speculation.py [--model smollm2] [--streams 1 16 64] [--methods suffix ngram] [--output FILE]

- copier: a model that copies by construction (make_copier.py), of the size of a 60M llama.  A sampled token is another
  than the copied one as often as the temperature says, and the text goes on from there.  Prompts are pieces of Python's
  standard library.
- smollm2: SmolLM2-135M-Instruct answers chats (real_chats.py), and ends its answers itself.

Prompts are others in each round, so nothing is known from before.  Both sides must give the same tokens.

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
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import common
import msgspec
from real_chats import RealChats

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


class Source(Protocol):
    """A model and its works."""

    folder: Path
    works: Collection[str]

    def request(self, name: str, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
        """A prompt for the work, and sampling parameters."""


class Copier:
    """Implements `Source`."""

    works = WORKS

    def __init__(self) -> None:
        self.folder = common.copier()
        self._texts = texts_of(self.folder)

    def request(self, name: str, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
        work = WORKS[name]
        return prompt(work, self._texts, rng), {"temperature": work.temperature, "ignore_eos": True}


MODELS: dict[str, Callable[[], Source]] = {"copier": Copier, "smollm2": RealChats}


class Stopwatch:
    """Sums the seconds within the methods of the drafters of engines."""

    def __init__(self, engines: Iterable[Any]) -> None:
        self.seconds = 0.0
        for llm in engines:
            (drafter,) = (one for one in llm.core.listeners if isinstance(one, AdaptiveDrafter))
            for name in ("step_begins", "propose", "observe", "step_done", "ended"):
                setattr(drafter, name, self._timed(getattr(drafter, name)))
            llm.core.scheduler.listen(())  # which looks up the methods of the listeners

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

    def __init__(self, source: Source, method: str, dtype: str, threads: int) -> None:
        from inflight import LLM

        self.source = source
        options = {"dtype": dtype, "kv_cache_memory": "1GiB", "cpu_threads": threads, "max_num_seqs": 64}
        options["enable_prefix_caching"] = False  # each engine writes to the blocks that are free to the other
        self.on = [LLM(str(source.folder), **options, speculative_config={"method": method}) for _ in range(2)]
        self.off = [copy.copy(llm) for llm in self.on]
        for llm in self.off:
            llm.engine = copy.copy(llm.engine)
            llm.engine._open = {}
            llm.engine.core = make_core(msgspec.structs.replace(llm.config, speculative_config=None), llm.core.runner)
        self.watch = Stopwatch(self.on)
        settle_garbage_collector()

    def counts(self) -> list[int]:
        """Drafts, draft tokens, and accepted ones, so far."""
        engines = [llm.core.scheduler.policies.draft_counts.totals()[:3] for llm in self.on]
        return [sum(numbers) for numbers in zip(*engines)]

    def run(self, name: str, streams: int, tokens: int, number: int) -> dict[str, Run]:
        """Both sides of a round of this number."""
        from inflight import SamplingParams

        rng = random.Random(f"{name} {streams} {number}")
        asked = [self.source.request(name, rng) for _ in range(streams)]
        prompts = [prompt for prompt, _ in asked]
        params = [
            SamplingParams(seed=rng.randrange(2**40), max_tokens=tokens, detokenize=False, **options)
            for _, options in asked
        ]
        place = number % 2
        sides = {"off": Run(self.off[place], prompts, params), "on": Run(self.on[1 - place], prompts, params)}
        gc.collect()
        for turn in itertools.count():
            going = [side for side in sides.values() if not side.finished]
            if not going:
                break
            min(going if turn % 2 else reversed(going), key=lambda side: side.num_tokens).step()
        assert sides["on"].tokens == sides["off"].tokens, f"{name}, {streams}: the tokens are not the same"
        return sides


class Cell(NamedTuple):
    """One work at one number of streams.

    Attributes:
        rates: of each side, output tokens a second in each round.
        drafts: drafts, their tokens, and accepted ones.
        accepted_per_step: draft tokens that a sequence accepted in a step that gave it tokens, on average.
        drafter_share: of the time, spent in the drafter.
    """

    rates: dict[str, list[float]]
    drafts: list[int]
    accepted_per_step: float
    drafter_share: float

    @property
    def ratio(self) -> float:
        return statistics.median(on / off for on, off in zip(self.rates["on"], self.rates["off"]))


def measured(bench: Bench, name: str, streams: int, tokens: int, rounds: int) -> Cell:
    for number in (-2, -1):  # warms up, and learns
        bench.run(name, streams, tokens, number)
    bench.watch.seconds = 0.0
    before = bench.counts()
    runs = [bench.run(name, streams, tokens, number) for number in range(rounds)]
    drafts = [now - then for now, then in zip(bench.counts(), before)]
    rates = {side: [run[side].num_tokens / run[side].seconds for run in runs] for side in ("off", "on")}
    on = [run["on"] for run in runs]
    # A step gives a sequence its accepted drafts and one token more.
    steps = sum(run.num_tokens for run in on) - drafts[2]
    return Cell(rates, drafts, drafts[2] / steps, bench.watch.seconds / sum(run.seconds for run in on))


def main() -> None:
    arguments = common.options(
        __doc__,
        model=common.choice(MODELS, "copier"),
        works=dict(choices=list(WORKS), nargs="+", help="default: all of the model"),
        streams=[1, 16, 64],
        rounds=3,
        tokens=192,
        methods=dict(choices=["suffix", "ngram"], default=["suffix"], nargs="+"),
        dtype=common.choice(["bfloat16", "float32"], "float32"),
        threads=2,
    )
    source = MODELS[arguments.model]()
    cells: dict[str, Cell] = {}
    for method in arguments.methods:
        bench = Bench(source, method, arguments.dtype, arguments.threads)
        for name in arguments.works or source.works:
            for streams in arguments.streams:
                key = f"{method}, {name}, {streams}"
                cell = cells[key] = measured(bench, name, streams, arguments.tokens, arguments.rounds)
                print(
                    f"{key:<18} off {statistics.median(cell.rates['off']):8.1f}  "
                    f"on {statistics.median(cell.rates['on']):8.1f} tokens/s  ratio {cell.ratio:.3f}  "
                    f"accepted a step {cell.accepted_per_step:.2f}  drafts, tokens, accepted {cell.drafts}  "
                    f"drafter {cell.drafter_share:.2%}",
                    flush=True,
                )
    rates = {f"{key}, {side}": one for key, cell in cells.items() for side, one in cell.rates.items()}
    ratios = {key: round(cell.ratio, 3) for key, cell in cells.items()}
    common.record(
        arguments,
        {key: [round(rate, 1) for rate in found] for key, found in rates.items()},
        ratios=ratios,
        accepted_per_step={key: round(cell.accepted_per_step, 3) for key, cell in cells.items()},
        drafts_tokens_accepted={key: cell.drafts for key, cell in cells.items()},
        drafter_share={key: round(cell.drafter_share, 4) for key, cell in cells.items()},
    )
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
