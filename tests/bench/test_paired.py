"""A benchmark compared with itself at an earlier commit: what is read of its output, and how it is compared."""

from __future__ import annotations

import re

import paired
import pytest


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "bench").mkdir()
    script = tmp_path / "bench" / "script.py"
    script.write_text("import os, sys\nprint('a 1.5 us\\n  b 3 us', *sys.argv[1:])\nprint(os.environ['PYTHONPATH'])\n")
    return tmp_path


def test_a_figure_is_every_match_of_its_pattern(tree):
    figures = {"us": re.compile(r"([\d.]+) us", re.MULTILINE), "b": re.compile(r"^  b (\d+)", re.MULTILINE)}
    assert paired.run(tree, ["script.py", "--fast"], figures) == {"us": [1.5, 3.0], "b": [3.0]}


def test_imports_come_from_the_tree(tree, capsys):
    assert paired.environment(tree)["PYTHONPATH"].split(":")[:4] == [
        str(tree / n) for n in ("backend", "client", "gateway", "tools")
    ]


def test_a_record_names_the_commit_and_not_what_it_was_called():
    assert paired.hash_of("HEAD") == paired.git("rev-parse", "HEAD")[:12]
    assert paired.hash_of(paired.hash_of("HEAD")) == paired.hash_of("HEAD")


def test_a_figure_that_is_not_printed_ends_the_comparison(tree):
    with pytest.raises(SystemExit, match="prints nothing that matches the figure 'ms'"):
        paired.run(tree, ["script.py"], {"ms": re.compile(r"([\d.]+) ms")})


def test_a_benchmark_that_fails_ends_the_comparison(tree):
    (tree / "bench" / "script.py").write_text("raise RuntimeError('no kernel')")
    with pytest.raises(SystemExit, match="no kernel"):
        paired.run(tree, ["script.py"], {})


def test_the_ratio_is_the_median_of_the_rounds_pairs():
    new, base = [[2.0, 10.0], [3.0, 30.0], [9.0, 20.0]], [[1.0, 10.0], [1.0, 10.0], [3.0, 40.0]]
    assert paired.ratios(new, base) == [3.0, 1.0]
