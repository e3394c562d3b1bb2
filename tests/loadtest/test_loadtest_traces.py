"""Replayed traces: the columns of Azure's and Mooncake's files, and plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.traces import read_trace
from loadtest.options import LoadOptions

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319600,2396,109
2023-11-16 18:17:05.5,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1300, "output_length": 26, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 600, "output_length": 9, "hash_ids": [0, 3]}

{"timestamp": 1000, "input_length": 50, "output_length": 0, "hash_ids": [4]}
"""


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_columns(tmp_path: Path) -> None:
    jobs = read_trace(_write(tmp_path, "azure.csv", AZURE)).jobs
    assert [(job.prompt_tokens, job.output_tokens) for job in jobs] == [(374, 44), (2396, 109), (879, 55)]
    assert [job.due for job in jobs] == pytest.approx([0.0, 0.052, 1.52004], abs=1e-4)
    assert [job.kind for job in jobs] == ["under 512", "2K to 8K", "512 to 2K"]


def test_azure_time_zones(tmp_path: Path) -> None:
    jobs = read_trace(_write(tmp_path, "azure.csv", AZURE_2024)).jobs
    assert [job.due for job in jobs] == pytest.approx([0.0, 0.99007], abs=1e-4)


def test_mooncake_columns_sort_by_arrival_and_skip_empty_outputs(tmp_path: Path) -> None:
    jobs = read_trace(_write(tmp_path, "moon.jsonl", MOONCAKE)).jobs
    assert [(job.due, job.prompt_tokens, job.hash_ids) for job in jobs] == [(0.0, 600, (0, 3)), (2.0, 1300, (0, 1, 2))]


def test_plain_columns_and_a_limit(tmp_path: Path) -> None:
    path = _write(tmp_path, "plain.csv", "arrival,prompt_tokens,output_tokens\n10.5,8,4\n11,9,5\n12,1,1\n")
    assert [(job.due, job.prompt_tokens) for job in read_trace(path, limit=2).jobs] == [(0.0, 8), (0.5, 9)]


def test_scaling_and_speed(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, "moon.jsonl", MOONCAKE)).scaled(663).at_speed(4)
    assert trace.longest <= 663
    assert trace.jobs[1].due == 0.5
    assert (trace.jobs[1].prompt_tokens, trace.jobs[1].hash_ids) == (650, (0, 1))


def test_a_trace_is_a_load(tmp_path: Path) -> None:
    options = LoadOptions(trace=str(_write(tmp_path, "azure.csv", AZURE)), requests=2, context=1000)
    jobs = list(options.jobs())
    assert len(jobs) == 2 and jobs[1].due == pytest.approx(0.052, abs=1e-4)
    assert all(len(options.prompts().make(job)) == job.prompt_tokens for job in jobs)
    closed = LoadOptions(trace=options.trace, arrivals="closed")
    assert [job.due for job in closed.jobs()] == [None] * 3


def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name, text, said in [
        ("a.csv", "when,prompt\n1,2\n", "expected one of: TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("a.csv", "arrival,prompt_tokens,output_tokens\nsoon,2,3\n", "request 1: cannot read arrival='soon'"),
        ("a.csv", "arrival,prompt_tokens,output_tokens\nnan,2,3\n", "request 1: cannot read arrival='nan'"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 1e400, "output_length": 5}', "request 1: cannot read .*=inf"),
        ("a.csv", "arrival,prompt_tokens,output_tokens\n", "contains no request"),
        ("a.jsonl", "[1, 2]\n", "line 1: not a JSON object"),
    ]:
        with pytest.raises(WorkloadError, match=said):
            read_trace(_write(tmp_path, name, text))
