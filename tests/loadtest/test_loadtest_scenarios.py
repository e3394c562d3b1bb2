"""The requests of a load: named mixes, their scaling, prompts with exact token counts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.prompts import IdPrompts
from inflight_tools.workload.scenarios import SCENARIOS, Job, find_scenario
from loadtest.options import LoadOptions
from loadtest.prompts import TextPrompts, load_tokenizer
from loadtest.ramp import ramp_users

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "model_repository" / "demo" / "1" / "checkpoint"


def test_requests_lie_within_their_class_and_are_reproducible() -> None:
    for name in SCENARIOS:
        scenario = SCENARIOS[name]
        bounds = {prompt_class.name: prompt_class.prompt for prompt_class in scenario.classes}
        jobs = [scenario.job(index, seed=3) for index in range(300)]
        assert jobs == [scenario.job(index, seed=3) for index in range(300)]
        for job in jobs:
            assert bounds[job.kind].low <= job.prompt_tokens <= bounds[job.kind].high
            assert job.prompt_tokens + job.output_tokens <= scenario.longest


def test_another_seed_gives_other_requests() -> None:
    scenario = SCENARIOS["lognormal"]
    assert [scenario.job(k, 1) for k in range(9)] != [scenario.job(k, 2) for k in range(9)]


def test_lognormal_outputs_follow_their_distribution() -> None:
    tokens = np.array([SCENARIOS["lognormal"].job(index, 1).output_tokens for index in range(4000)])
    assert tokens.min() >= 10 and tokens.max() <= 370
    assert abs(np.median(tokens) - np.exp(4.0)) < 3  # the median is exp(mu); 3 is four standard errors
    inner = np.log(tokens[(tokens > 10) & (tokens < 370)])
    assert abs(inner.std() - 0.76) < 0.03  # 0.8, less what clipping removes


def test_chat_rag_has_the_stated_shares() -> None:
    kinds = [SCENARIOS["chat-rag"].job(index, 1).kind for index in range(3000)]
    shares = [kinds.count(name) / 3000 for name in ("chat", "rag", "document")]
    assert np.allclose(shares, [0.7, 0.2, 0.1], atol=0.03)


def test_bursts_are_half_short_half_long() -> None:
    jobs = list(LoadOptions(scenario="bursty", requests=20).jobs())
    assert sorted(job.output_tokens for job in jobs[:10]) == [50] * 5 + [500] * 5
    assert {job.due for job in jobs[:10]} == {0.0}
    assert [job.due for job in jobs[10:]] == pytest.approx([12.0] * 10)


def test_a_scaled_scenario_fits() -> None:
    for name in SCENARIOS:
        for context in [64, 600, 2048, 131072]:
            scenario = SCENARIOS[name].scaled(context)
            assert scenario.longest <= max(context, 1)
            for index in range(50):
                job = scenario.job(index, 1)
                assert job.prompt_tokens >= 1 and job.output_tokens >= 1
                assert job.prompt_tokens + job.output_tokens <= context


def test_a_scenario_that_fits_is_not_scaled() -> None:
    assert SCENARIOS["lognormal"].scaled(8192) == SCENARIOS["lognormal"]


def test_id_prompts_have_exactly_the_requested_length() -> None:
    for count in [1, 2, 17, 512, 513, 3000]:
        prompts = IdPrompts(2560, seed=1)
        ids = prompts.make(Job(0, "x", count, 1))
        assert len(ids) == count
        assert all(300 <= token < 2560 for token in ids)
        assert ids != prompts.make(Job(1, "x", count, 1)) or count < 3


def test_equal_hash_ids_are_equal_blocks() -> None:
    prompts = IdPrompts(2560, seed=1)
    one = prompts.make(Job(0, "x", 1300, 1, hash_ids=(7, 8, 9)))
    two = prompts.make(Job(1, "x", 1030, 1, hash_ids=(7, 8, 10)))
    assert (len(one), len(two)) == (1300, 1030)
    assert one[:1024] == two[:1024]
    assert one[1024:1030] != two[1024:1030]


def test_text_prompts_tokenise_to_exactly_the_requested_number() -> None:
    for count in [1, 2, 3, 10, 63, 500, 2000]:
        tokenizer = load_tokenizer(DEMO)
        for index in range(3):
            text = TextPrompts(tokenizer, seed=1).make(Job(index, "x", count, 1))
            assert len(tokenizer.encode(text).ids) == count


def test_texts_share_the_blocks_that_they_are_said_to_share() -> None:
    tokenizer = load_tokenizer(DEMO)
    jobs = [
        Job(index, "x", 1100 + 50 * index, 1, hash_ids=blocks) for index, blocks in enumerate([(4, 5), (4, 5), (4, 6)])
    ]
    prompts = TextPrompts(tokenizer, seed=1)
    first, second, third = (tokenizer.encode(prompts.make(job)).ids for job in jobs)
    assert [len(ids) for ids in (first, second, third)] == [1100, 1150, 1200]

    def shared(one: list[int], other: list[int]) -> int:
        return next(place for place, (a, b) in enumerate(zip(one, other)) if a != b)

    assert 950 < shared(first, second) < 1090
    assert 450 < shared(first, third) < 570


def test_ramp_goes_up_stays_and_goes_down() -> None:
    users = [ramp_users(second, 40, (10, 20, 10)) for second in range(41)]
    assert users[0] == 1 and users[5] == 20
    assert users[10:31] == [40] * 21
    assert users[35] == 20 and users[40] is None


def test_wrong_options_say_what_is_allowed() -> None:
    for options, said in [
        (LoadOptions(scenario="no-such"), "choose one of lognormal"),
        (LoadOptions(arrivals="gaussian"), "poisson, gamma, constant"),
        (LoadOptions(arrivals="trace"), "--trace"),
        (LoadOptions(arrivals="poisson", rate=-1.0), "must be above 0"),
        (LoadOptions(trace="/nowhere.csv"), "give a CSV or JSONL file"),
        (LoadOptions(adapters="doll,sheep,doll"), "give each name once"),
        (LoadOptions(adapters=","), "at most one is empty"),
    ]:
        with pytest.raises(WorkloadError, match=said):
            list(options.jobs())


def test_requests_take_the_adapters_in_turn() -> None:
    options = LoadOptions(scenario="chat-rag", requests=7, arrivals="poisson", adapters="doll, sheep,")
    plain = list(LoadOptions(scenario="chat-rag", requests=7, arrivals="poisson").jobs())
    jobs = list(options.jobs())
    assert [job.adapter for job in jobs] == ["doll", "sheep", "", "doll", "sheep", "", "doll"]
    assert [job.kind for job in jobs[:3]] == [
        f"{name}, {job.kind}" for name, job in zip(("doll", "sheep", "no adapter"), plain)
    ]
    assert [dataclasses.replace(job, kind="", adapter="") for job in jobs] == [
        dataclasses.replace(job, kind="") for job in plain
    ]
    assert options.arguments()[-2:] == ["--adapters", "doll, sheep,"]
    assert {job.adapter for job in plain} == {""} and LoadOptions().adapter_names() == []


def test_text_prompts_need_a_tokenizer() -> None:
    with pytest.raises(WorkloadError, match="--tokenizer"):
        LoadOptions(prompt="text").prompts()
    with pytest.raises(WorkloadError, match=r"tokenizer\.json"):
        LoadOptions(prompt="text", tokenizer="/nowhere").prompts()


def test_options_survive_the_command_line() -> None:
    options = LoadOptions(scenario="bursty", seed=9, arrivals="gamma", rate=1.5, context=2048, prompt="auto")
    arguments = options.arguments()
    pairs = dict(zip(arguments[::2], arguments[1::2]))
    assert pairs == {"--scenario": "bursty", "--seed": "9", "--arrivals": "gamma", "--rate": "1.5", "--context": "2048"}
    assert find_scenario("bursty").name == dataclasses.asdict(options)["scenario"]


def test_every_request_of_a_long_load_is_handed_out_once() -> None:
    """Also past the requests that are prepared ahead.  Locust patches sockets, so it runs in a process of its own."""
    script = """
from loadtest.options import LoadOptions
from loadtest.users import RequestFeed
feed = RequestFeed(LoadOptions(scenario="uniform", requests=600), None, None)
feed.start()
print([taken[0].index for taken in iter(feed.take, None)])
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == list(range(600))
