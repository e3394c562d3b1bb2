"""A soak reports real problems and no others."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight_client.errors import DeadlineExceededError, InflightError, InvalidRequestError, UnavailableError
from inflight_client.results import Choice, GenerationResult, Timings, Usage
from loadtest.soak import __main__ as command
from loadtest.soak import traffic as module
from loadtest.soak.cases import Case, make_cases, matches
from loadtest.soak.resources import Held, Idle, leaks
from loadtest.soak.run import Plan, Verdict
from loadtest.soak.traffic import Traffic

KNOWN = (("one two", (1, 2), "length"), ("three", (3,), "stop"))


def test_cases_are_the_same_for_the_same_seed_and_have_one_right_answer_each() -> None:
    cases = make_cases(60, 1)
    assert cases == make_cases(60, 1) != make_cases(60, 2)
    assert all(case.options.get("temperature") == 0.0 or "seed" in case.options for case in cases)
    used = {name for case in cases for name in case.options}
    assert {"n", "stop", "logprobs", "repetition_penalty", "one_response", "top_p"} <= used


def test_an_answer_that_was_cut_off_must_begin_as_the_known_one() -> None:
    for got, whole, partly in [
        (KNOWN, True, True),
        ((("one", (1,), None), ("", (), None)), False, True),
        ((("one two", (1, 2), "length"),), False, False),  # a sequence is missing
        ((("one two", (1, 3), "length"), KNOWN[1]), False, False),
        ((("one too", (1, 2), "length"), KNOWN[1]), False, False),
        ((("one two", (1, 2), "stop"), KNOWN[1]), False, True),
        ((("one two three", (1, 2, 3), None), KNOWN[1]), False, False),
    ]:
        assert matches(got, KNOWN, whole=True) is whole
        assert matches(got, KNOWN, whole=False) is partly


class Client:
    """Answers every request with KNOWN, changed by `answer`."""

    def __init__(self, answer: Any = KNOWN, error: InflightError | None = None, hangs: bool = False) -> None:
        self.answer, self.error, self.hangs = answer, error, hangs

    def stream(self, prompt: str, **options: Any) -> Client:
        return self

    async def generate(self, prompt: str, **options: Any) -> None:
        if self.error:
            raise self.error

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> Any:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.error:
            raise self.error
        yield None

    def result(self) -> GenerationResult:
        choices = [Choice(i, text, list(ids), len(ids), reason) for i, (text, ids, reason) in enumerate(self.answer)]
        return GenerationResult("r", "m", choices, Usage(1, 3), Timings(None, [], None, 0.1))


def ask(client: Client, habit: str, monkeypatch: pytest.MonkeyPatch, away: bool = False) -> Traffic:
    """One request of that habit."""
    monkeypatch.setattr(module, "_HABITS", {habit: 1})
    traffic = Traffic({"grpc": client}, [(Case("p", {}), KNOWN)], seed=1)  # type: ignore[dict-item]
    if away:
        traffic.model_away()
    asyncio.run(traffic._request())
    return traffic


CUT = (("one", (1,), None), ("", (), None))
WRONG = (("two", (2,), None), ("", (), None))
REFUSED = UnavailableError("the model is being unloaded")
SHED = UnavailableError(
    "the queue is too long for the request's deadline: it would end in about 0.2 s, and 0.1 s are left"
)
LOST = UnavailableError("the engine process died")
LOST.partial = Client(CUT).result()


def test_each_ending_is_counted_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for habit, client, away, ending, problem in [
        ("whole", Client(), False, "right to the last token", None),
        ("whole", Client(CUT), False, "wrong", "wrong answer"),
        ("whole", Client(error=REFUSED), False, "failed", "UnavailableError"),
        ("whole", Client(error=REFUSED), True, "refused while the model was away", None),
        ("whole", Client(error=LOST), True, "refused while the model was away", "ended in the middle"),
        ("whole", Client(error=DeadlineExceededError("late")), False, "failed", "DeadlineExceededError"),
        ("whole", Client(hangs=True), False, "without an end", "no end within"),
        ("deadline", Client(CUT, DeadlineExceededError("late")), False, "ended by the deadline", None),
        ("deadline", Client(error=SHED), False, "refused because of the deadline", None),
        ("deadline", Client(error=REFUSED), False, "failed", "UnavailableError"),
        ("whole", Client(error=SHED), False, "failed", "UnavailableError"),
        ("deadline", Client(WRONG, DeadlineExceededError("late")), False, "wrong", "wrong answer"),
        ("deadline", Client(CUT), False, "wrong", "wrong answer"),
        ("bad", Client(error=InvalidRequestError("no")), False, "refused as invalid", None),
        ("bad", Client(), False, None, "a bad request was served"),
        ("bad", Client(error=InvalidRequestError("x", code="NOT_FOUND")), False, "failed", "InvalidRequestError"),
    ]:
        monkeypatch.setattr(module, "_END_SECONDS", 0.05)
        traffic = ask(client, habit, monkeypatch, away)
        assert traffic.counts == Counter({ending: 1} if ending else {})
        assert [text.startswith(str(problem)) for text in traffic.problems] == ([True] if problem else [])


def test_many_problems_of_a_kind_hide_no_other() -> None:
    traffic = Traffic({}, [], seed=1)
    for index in range(9):
        traffic.problem(f"UnavailableError: the queue is too long: it would end in {index} s")
    traffic.problem("UnavailableError: the engine died: pid 7")
    assert traffic.num_problems == 10
    assert [text.split(": ")[1] for text in traffic.problems] == [*["the queue is too long"] * 5, "the engine died"]


def test_a_cancelled_request_is_compared_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Client):
        async def __aiter__(self) -> Any:
            while True:
                yield None

    assert ask(Endless(CUT), "cancel", monkeypatch).counts == Counter({"cancelled": 1})
    assert ask(Endless(WRONG), "cancel", monkeypatch).num_problems == 1


def idle(**changes: Any) -> Idle:
    held = {"server": Held(1, 2**30, 100, 50), "stubs": Held(1, 2**28, 20, 9), "engines": Held(1, 2**29, 9, 4)}
    return dataclasses.replace(Idle(held, (1, 2**20), 0, 0, {"a_total": 5}), **changes)


def test_what_the_server_holds_must_not_grow() -> None:
    for late, says in [
        (idle(), None),
        (idle(by_kind={**idle().by_kind, "server": Held(1, 2**30 + 2**27, 104, 52)}), None),
        (idle(by_kind={**idle().by_kind, "server": Held(1, 2**30 + 2**28, 100, 50)}), "server: rss grew"),
        (idle(by_kind={**idle().by_kind, "stubs": Held(1, 2**28, 40, 9)}), "stubs: fds grew from 20 to 40"),
        (idle(by_kind={**idle().by_kind, "engines": Held(1, 2**29, 9, 40)}), "engines: threads grew from 4 to 40"),
        (idle(by_kind={**idle().by_kind, "stubs": Held(2, 2**28, 20, 9)}), "stubs: 1 processes became 2"),
        (idle(shm=(2, 2**20)), "/dev/shm"),
        (idle(shm=(1, 2**23)), "/dev/shm"),
        (idle(blocks=3), "3 KV blocks and 0 sequences are held"),
        (idle(sequences=1), "0 KV blocks and 1 sequences are held"),
        (idle(counters={"a_total": 6, "b_total": 1}), None),
        (idle(counters={"a_total": 4}), "the counter a_total fell from 5 to 4"),
        (idle(counters={}), "the counter a_total fell from 5 to 0"),
    ]:
        found = leaks(idle(), late)
        assert [says in text for text in found] == [True] if says else found == []


def test_the_record_has_the_plan_and_each_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def soak(plan: Plan, *_: object) -> Verdict:
        plans.append(plan)
        waits = {"load": [2.0, 1.0, 1.5], "the old stub to leave": [0.25]}
        return Verdict(9.0, Counter(), Counter({"reloads": 3}), waits, idle(), idle(), 0)

    monkeypatch.setattr(command, "soak", soak)
    output = tmp_path / "turns.json"
    done = CliRunner().invoke(command.app, ["--turns", "3", "--no-kills", "--no-spare", "--output", str(output)])
    assert done.exit_code == 0 and "waited for load: median 1.50 s, longest 2.00 s" in done.output
    record = json.loads(output.read_text())
    assert record["waits"] == {"load": [2.0, 1.0, 1.5], "the old stub to leave": [0.25]}
    assert record["plan"] == dataclasses.asdict(plans[0]) and record["plan"]["turns"] == 3
    assert not plans[0].kills and not plans[0].spare and record["report"][-1] == "passed"
    missing = CliRunner().invoke(command.app, ["--output", str(tmp_path / "missing" / "turns.json")])
    assert missing.exit_code == 2 and len(plans) == 1, "refused before the run"


def test_a_server_is_at_rest_with_its_spare_process_or_without() -> None:
    for engines, spare in ((2, True), (1, False)):
        at_rest = idle(by_kind={**idle().by_kind, "engines": Held(engines)})
        assert at_rest.is_settled(spare) and not at_rest.is_settled(not spare)
        assert not dataclasses.replace(at_rest, blocks=1).is_settled(spare)
