"""The in-process API, with the demo model."""

from __future__ import annotations

import atexit
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from nightly import nightly_but
from transformers import AutoModelForCausalLM, AutoTokenizer

import inflight
from inflight import LLM, SamplingParams
from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats
from inflight.engine.integrity import check_core
from inflight.engine.logprobs import Logprobs
from inflight.engine.messages import StepMessage
from inflight.frontend.errors import RequestError
from inflight.loading.saved import weights_file
from inflight.loading.startup import wait_until_kept

DEMO = str(Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint")
PROMPTS = ["Return a list of", "Open the file and", "The default value is", "é ü 日本"]


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    return LLM(DEMO, dtype="float32", kv_cache_memory="64MiB", max_logprobs=2560)


def greedy(max_tokens: int = 24, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def test_a_program_that_ends_at_once_waits_until_its_weights_are_kept(tmp_path, monkeypatch):
    written = threading.Event()
    write = weights_file.write
    monkeypatch.setattr(weights_file, "write", lambda *parts: written.wait() and write(*parts))
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path))
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    with LLM(DEMO, dtype="float32", kv_cache_memory="64MiB") as llm:
        assert (wait_until_kept, llm.engine._info.load_seconds) in at_exit
        assert not list(tmp_path.glob("weights/*.iw"))
    written.set()
    wait_until_kept()
    assert len(list(tmp_path.glob("weights/*.iw"))) == 1


def test_text_and_tokens_are_those_of_transformers(llm):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, greedy())):
        ids = tokenizer(prompt, return_tensors="pt")
        assert result.prompt_token_ids == ids["input_ids"][0].tolist()
        with torch.inference_mode():
            whole = model.generate(**ids, max_new_tokens=24, do_sample=False)[0].tolist()
        output = result.outputs[0]
        assert output.token_ids == whole[len(result.prompt_token_ids) :]
        both = tokenizer.decode(whole, skip_special_tokens=True)
        assert both.startswith(prompt)
        assert output.text == both[len(prompt) :]


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm):
    free = llm.generate(PROMPTS[0], greedy(40, ignore_eos=True))[0].outputs[0].text
    stop = free[15:19]
    cut = llm.generate(PROMPTS[0], greedy(40, ignore_eos=True, stop=[stop]))[0].outputs[0]
    assert cut.text == free[: free.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = llm.generate(PROMPTS[0], greedy(40, ignore_eos=True, stop=[stop], include_stop_str_in_output=True))
    assert kept[0].outputs[0].text == free[: free.index(stop)] + stop
    assert not llm.core.has_work
    check_core(llm.core)


def test_stream_yields_growing_text_and_aborts_when_closed(llm):
    stream = llm.stream(PROMPTS[1], greedy(60, ignore_eos=True))
    texts = [next(stream).outputs[0].text for _ in range(10)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    other = llm.generate(PROMPTS[2], greedy(5, ignore_eos=True))[0]
    assert other.outputs[0].finish_reason == "length"
    stream.close()
    assert not llm.core.has_work
    check_core(llm.core)


def test_n_logprobs_and_defaults(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=8, logprobs=2, prompt_logprobs=1)
    result = llm.generate(PROMPTS[0], params)[0]
    assert len({output.text for output in result.outputs}) == 3
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    one = llm.generate(PROMPTS[0], SamplingParams(seed=1, max_tokens=1, prompt_logprobs=1))[0]
    assert result.prompt_logprobs == one.prompt_logprobs
    assert result.prompt_logprobs[0] is None
    for output in result.outputs:
        assert len(output.logprobs) == len(output.token_ids)
        chosen = [place[token_id] for place, token_id in zip(output.logprobs, output.token_ids)]
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
        assert "".join(entry.decoded_token for entry in chosen) == output.text
    assert len(llm.generate(PROMPTS[0])[0].outputs[0].token_ids) <= 16


def test_allowed_tokens_all_log_probabilities_and_no_text(llm):
    params = greedy(6, allowed_token_ids=[300, 7], logprobs=-1, prompt_logprobs=-1, detokenize=False, ignore_eos=True)
    result, plain = llm.generate(["Return a list"] * 2, [params, greedy(6, logprobs=1)])
    (output,) = result.outputs
    assert set(output.token_ids) <= {300, 7}
    assert (output.text, plain.outputs[0].text != "") == ("", True)
    vocab_size = llm.core.info.vocab_size
    for entry in [*output.logprobs, *result.prompt_logprobs[1:]]:
        assert sorted(entry) == list(range(vocab_size))
        assert 1 in [logprob.rank for logprob in entry.values()][:2]
    assert all(len(entry) in (1, 2) for entry in plain.outputs[0].logprobs), "a neighbour gets what it asked for"


def test_an_invalid_request_raises_and_leaves_nothing_behind(llm):
    for prompts, params, message in [
        ([[]], greedy(), "the prompt is empty"),
        (["x", [10**6]], greedy(), "token id 1000000 is not in the vocabulary"),
        (["x", "y"], [greedy()], "2 prompts, but 1 params"),
        (["x"], object(), "sampling_params of type object: give inflight.SamplingParams"),
        (["x"], "greedy", "1 prompts, but 6 params"),
        (["x", "y"], [greedy(), greedy(n=129)], r"n=129: at most 128 are allowed \(max_n in model.json\)"),
        (["x"], greedy(logprobs=2561), "logprobs=2561: at most 2560 are allowed"),
        (["x"], greedy(prompt_logprobs=2561), "prompt_logprobs=2561: at most 2560 are allowed"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)
        assert not llm.core.has_work
        check_core(llm.core)


class EngineStub:
    """Replaces the core: plays back the messages of its steps."""

    only_holds = False

    def __init__(self, *messages: StepMessage) -> None:
        self.messages = list(messages)
        self.taken: list[int] = []
        self.aborted: list[tuple[int, int | None]] = []

    def add_request(self, message) -> None:
        self.taken.append(message.request_id)

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def step(self) -> StepMessage:
        return self.messages.pop(0)


def step(*deltas: SequenceDelta, failed: tuple[RequestFailed, ...] = ()) -> StepMessage:
    return StepMessage(list(deltas), StepStats(*[0] * 10, 0.0), failed=list(failed))


@pytest.fixture
def played(llm, monkeypatch):
    """Replaces the engine by one that plays back messages; requests count from 0."""

    def play(*messages: StepMessage) -> EngineStub:
        stub = EngineStub(*messages)
        monkeypatch.setattr(llm.engine, "core", stub)
        monkeypatch.setattr(llm.engine, "_ids", itertools.count())
        return stub

    return play


def test_runs_of_several_tokens_are_cut_at_a_stop_string(llm, played):
    ids = llm.tokenizer.encode(" the list of names", add_special_tokens=False)
    logprobs = [[(token, -0.5, 1)] for token in ids]
    stub = played(step(SequenceDelta(0, 0, ids[:2], None, None, Logprobs.of(logprobs[:2]))),
                  step(SequenceDelta(0, 0, ids[2:], None, None, Logprobs.of(logprobs[2:]))))  # fmt: skip
    output = llm.generate("Return", SamplingParams(max_tokens=9, logprobs=0, stop=["st of"]))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (" the li", "stop", "st of")
    kept = len(output.token_ids)
    assert output.token_ids == ids[:kept] and 2 < kept < len(ids)
    assert [list(place) for place in output.logprobs] == [[token] for token in ids[:kept]]
    assert output.cumulative_logprob == -0.5 * kept
    assert stub.aborted[0] == (0, 0)


def test_a_request_that_the_engine_gives_up_raises_and_aborts_the_others(llm, played):
    stub = played(step(SequenceDelta(0, 0, [5])), step(failed=(RequestFailed(1, "UNAVAILABLE", "waited too long"),)))
    with pytest.raises(RequestError, match="waited too long") as caught:
        llm.generate(["a", "b"], greedy())
    assert caught.value.code == "UNAVAILABLE"
    assert stub.taken == [0, 1] and (0, None) in stub.aborted
    assert not llm.engine.has_open


def test_a_request_that_the_engine_gives_up_ends_no_other_call(llm, played):
    played(
        step(SequenceDelta(0, 0, [5])),
        step(SequenceDelta(1, 0, [5]), failed=(RequestFailed(0, "UNAVAILABLE", "waited too long"),)),
        step(SequenceDelta(1, 0, [6], "length")),
    )
    stream = llm.stream("a", greedy())
    next(stream)
    assert llm.generate("b", greedy())[0].outputs[0].token_ids == [5, 6]
    with pytest.raises(RequestError, match="waited too long"):
        next(stream)
    assert not llm.engine.has_open


IMPORT = "import sys; sys.modules[{missing!r}] = None; from inflight import {name}"


@pytest.mark.parametrize("missing", nightly_but(["torch"], ["torch", "transformers"]))
def test_without_the_extra_the_import_says_what_to_install(missing):
    done = subprocess.run([sys.executable, "-c", IMPORT.format(missing=missing, name="LLM")], capture_output=True)
    last = done.stderr.decode().splitlines()[-1]
    said = f"inflight.LLM needs {missing}, which is not installed: pip install 'triton-inflight[backend]'"
    assert (done.returncode, last) == (1, f"ImportError: {said}")
    assert done.stderr.count(b"Traceback") == 1, "the failed import is not shown"


def test_sampling_params_need_no_extra():
    subprocess.run([sys.executable, "-c", IMPORT.format(missing="torch", name="SamplingParams")], check=True)


def test_another_failure_of_an_import_is_not_taken_for_a_missing_extra():
    done = subprocess.run([sys.executable, "-c", IMPORT.format(missing="msgspec", name="LLM")], capture_output=True)
    assert b"ModuleNotFoundError: import of msgspec halted" in done.stderr


@pytest.mark.parametrize("name", ["ChatTemplateError", "ConfigError", "LoadError", "RequestError"])
def test_what_is_raised_can_be_caught_by_a_public_name(name):
    assert name in inflight.__all__ and issubclass(getattr(inflight, name), Exception)
