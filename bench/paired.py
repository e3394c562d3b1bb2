#!/usr/bin/env python3
"""Any benchmark at this commit and at an earlier one, alternating, as the ratio of their figures.

    python bench/paired.py --base main~1 --rounds 5 --figure 'us=([\\d.]+) us \\(p99' -- scheduler.py --rounds 1
    python bench/paired.py --base v0.1.0 --figure 'tokens/s=inflight +([\\d.]+)' -- cpu.py --engines inflight --rounds 1

The earlier commit is checked out into a worktree of its own, its CPU kernels are compiled, and each run is
a fresh process that imports nothing from the other side.  A figure is NAME=REGEX (multi-line): the first group of each
match in what the benchmark prints, in order; the runs of one round are compared match by match.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("backend", "client", "gateway", "tools")


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def hash_of(commit: str) -> str:
    """Short hash of a commit, whose name can mean another one tomorrow."""
    return git("rev-parse", "--short=12", f"{commit}^{{commit}}").strip()


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of a commit."""
    with tempfile.TemporaryDirectory(prefix="inflight-paired-") as folder:
        tree = Path(folder) / "base"
        git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def environment(tree: Path) -> dict[str, str]:
    """Imports come from `tree`, even if another version is installed."""
    paths = [str(tree / name) for name in PACKAGES]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def compile_kernels(tree: Path) -> None:
    for script in (tree / "backend" / "inflight").glob("**/build.py"):
        subprocess.run([sys.executable, script], check=True, stdout=subprocess.DEVNULL)


def run(tree: Path, command: list[str], figures: dict[str, re.Pattern[str]]) -> dict[str, list[float]]:
    """The values that the benchmark prints for each figure.

    Raises:
        SystemExit: it fails, or prints none of a figure.
    """
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, str(tree / "bench" / script), *arguments],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{script} failed in {tree}:\n{done.stderr[-3000:]}")
    found = {name: [float(value) for value in pattern.findall(done.stdout)] for name, pattern in figures.items()}
    for name, values in found.items():
        if not values:
            sys.exit(f"{script} in {tree} prints nothing that matches the figure {name!r}:\n{done.stdout[-3000:]}")
    return found


def ratios(new: list[list[float]], base: list[list[float]]) -> list[float]:
    """For each place among the matches, the median over the rounds of new / base."""
    return [statistics.median(a / b for a, b in zip(ours, theirs)) for ours, theirs in zip(zip(*new), zip(*base))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="HEAD~1", help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", action="append", required=True, metavar="NAME=REGEX")
    parser.add_argument("--output", type=Path, help="write the record there as JSON")
    parser.add_argument("command", nargs="+", metavar="SCRIPT [ARG ...]", help="in bench/, after --")
    args = parser.parse_args()
    figures = {
        name: re.compile(pattern, re.MULTILINE) for name, _, pattern in (entry.partition("=") for entry in args.figure)
    }
    commits = {
        "base": hash_of(args.base),
        "new": git("rev-parse", "--short", "HEAD").strip(),
    }
    runs: dict[str, list[dict[str, list[float]]]] = {"base": [], "new": []}
    with checked_out(commits["base"]) as base:
        trees = {"base": base, "new": ROOT}
        for tree in trees.values():
            compile_kernels(tree)
        for number in range(args.rounds):
            for side in ("base", "new") if number % 2 == 0 else ("new", "base"):
                runs[side].append(run(trees[side], args.command, figures))
                print(f"round {number + 1}/{args.rounds}  {side:<4} {runs[side][-1]}", flush=True)
    summary = {}
    print(f"\n{common.machine()}: {commits['new']} / {commits['base']}, medians of {args.rounds} alternating runs")
    for name in figures:
        sides = {side: [taken[name] for taken in runs[side]] for side in runs}
        medians = {side: [statistics.median(values) for values in zip(*taken)] for side, taken in sides.items()}
        summary[name] = {**medians, "ratio": ratios(sides["new"], sides["base"])}
        for base, new, ratio in zip(medians["base"], medians["new"], summary[name]["ratio"]):
            print(f"  {name:<12} {base:10.1f} -> {new:10.1f}   ratio {ratio:.3f}")
    common.record(args, runs, commits=commits, summary=summary)


if __name__ == "__main__":
    main()
