"""`LLM`: forms of a prompt, defaults of the checkpoint, checkpoints without a tokenizer, machines without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from inflight import LLM, SamplingParams
from inflight.config import ConfigError, EngineConfig
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.generation_config import generation_defaults
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.text.tokenizer import Tokenizer, TokenizerError
from inflight.hub import CheckpointFileError, checkpoint_file

DEMO = Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS = dict(dtype="float32", kv_cache_memory="16MiB", max_model_len=128)


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    return LLM(str(DEMO), **OPTIONS)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A checkpoint with a configuration and weights only."""
    return LLM(make_checkpoint("llama", tmp_path_factory.mktemp("bare")), **OPTIONS)


def demo_copy(folder: Path, **generation: object) -> Path:
    """The demo's, with these entries in generation_config.json; none: without the file."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("generation_config.json"))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


class TestPrompts:
    TEXT = "Return a list of"

    def test_every_form_of_one_prompt(self, llm: LLM) -> None:
        ids = llm.tokenizer.encode(self.TEXT)
        forms = [
            self.TEXT,
            ids,
            {"prompt": self.TEXT},
            {"prompt_token_ids": ids},
            {"prompt": "x", "prompt_token_ids": ids},
        ]
        results = [llm.generate(form, GREEDY) for form in forms]
        assert {len(result) for result in results} == {1}
        assert len({tuple(result[0].outputs[0].token_ids) for result in results}) == 1
        assert [result[0].prompt_token_ids for result in results] == [ids] * 5
        assert [result[0].prompt for result in results] == [self.TEXT, None, self.TEXT, None, "x"]
        assert next(iter(llm.stream({"prompt_token_ids": ids}, GREEDY))).prompt_token_ids == ids

    def test_several_prompts_in_any_forms(self, llm: LLM) -> None:
        results = llm.generate([{"prompt_token_ids": [5, 6]}, "a", [7, 8, 9], {"prompt": "b"}], GREEDY)
        assert [result.prompt for result in results] == [None, "a", None, "b"]
        assert results[0].prompt_token_ids == [5, 6] and results[2].prompt_token_ids == [7, 8, 9]
        assert llm.generate([], GREEDY) == []

    def test_what_is_no_prompt_is_refused_before_anything_runs(self, llm: LLM) -> None:
        for prompts, message in [
            ({}, "a prompt in a dict has nothing"),
            ({"prompt": None, "prompt_token_ids": None}, "a prompt in a dict has nothing"),
            ({"prompt": ["a"]}, '"prompt" of type list'),
            ({"prompt": "a", "multi_modal_data": {"image": 1}}, "a prompt in a dict has multi_modal_data"),
            ({"prompt_token_ids": "12"}, "prompt_token_ids of type str is not a list of token ids"),
            ({"prompt_token_ids": [1.5]}, "prompt_token_ids of type list is not a list of token ids"),
            ({"prompt_token_ids": 3}, "prompt_token_ids of type int"),
            (["a", 7], "a prompt of type int is not a list of token ids, nor a string"),
            (["a", ["b"]], "a prompt of type list is not a list of token ids"),
            (b"abc", "a prompt of type bytes is not"),
        ]:
            with pytest.raises(ValueError, match=message):
                llm.generate(prompts, GREEDY)
            assert not llm.core.has_work and not llm.engine.has_open


GIVEN = dict(temperature=0.0, top_k=3, max_new_tokens=5, do_sample=True, eos_token_id=[0])


class TestDefaults:
    def test_of_the_checkpoint_are_those_of_generate_without_parameters(self, tmp_path: Path) -> None:
        path = demo_copy(tmp_path / "demo", **GIVEN)
        llm = LLM(str(path), **OPTIONS)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=3, max_tokens=5)
        first = llm.generate("Return a list of")[0].outputs[0].token_ids
        assert first == llm.generate("Return a list of")[0].outputs[0].token_ids
        assert len(first) <= 5
        assert len(llm.generate("Return", SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16

    def test_a_key_decides(self, tmp_path: Path) -> None:
        path, other = demo_copy(tmp_path / "demo", **GIVEN), demo_copy(tmp_path / "other", min_p=0.1, top_p=None)

        def found(**options: object) -> dict[str, object]:
            return generation_defaults(EngineConfig.from_dict({"model": str(path), **options}))

        assert found() == found(generation_config="auto") == {"temperature": 0.0, "top_k": 3, "max_tokens": 5}
        assert found(generation_config="vllm") == {}
        assert found(generation_config=str(other)) == {"min_p": 0.1}
        assert found(model=str(demo_copy(tmp_path / "none"))) == {}
        with pytest.raises(ConfigError, match=r"has no generation_config\.json; set it to"):
            found(generation_config=str(tmp_path / "none"))

    def test_values_that_cannot_be_are_refused_by_name(self, tmp_path: Path) -> None:
        for values in [{"top_p": 1.5}, {"top_k": 1.5}, {"temperature": "hot"}, {"max_new_tokens": 0}]:
            (name,) = values
            path = demo_copy(tmp_path / name, **values)
            with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}=.* must be .*\"vllm\" to ignore"):
                generation_defaults(EngineConfig.from_dict({"model": str(path)}))

    def test_requests_through_triton_take_them_only_if_asked(self, tmp_path: Path) -> None:
        path = demo_copy(tmp_path / "demo", temperature=0.5, max_new_tokens=9)

        def params(**options: object) -> SamplingParams:
            config = EngineConfig.from_dict({"model": str(path), "default_max_tokens": 7, **options})
            parser = RequestParser(config, Tokenizer.load(str(path)), ChatTemplate(None), 128, 4096)
            return parser.parse(WireRequest(ids_input(), {"top_k": 4})).engine_request.params

        assert (params().temperature, params().max_tokens, params().top_k) == (1.0, 7, 4)
        asked = params(generation_config="auto")
        assert (asked.temperature, asked.max_tokens, asked.top_k) == (0.5, 9, 4)
        assert params(generation_config="vllm").temperature == 1.0


def ids_input() -> dict:
    import numpy as np

    return {"input_ids": np.array([5, 6], dtype=np.int64)}


class TestWithoutATokenizer:
    def test_token_ids_are_served(self, bare: LLM) -> None:
        result = bare.generate([{"prompt_token_ids": [5, 6, 7]}, [8, 9]], GREEDY)
        assert [len(request.outputs[0].token_ids) for request in result] == [6, 6]
        assert [request.outputs[0].text for request in result] == ["", ""]

    def test_text_is_refused_by_name(self, bare: LLM) -> None:
        for prompt, params in [("a", GREEDY), ([5], SamplingParams(stop=["x"]))]:
            with pytest.raises(ValueError, match="has no tokenizer, so prompts, stop and bad words cannot be text"):
                bare.generate([[5], prompt], [GREEDY, params])
        assert not bare.core.has_work

    def test_through_triton(self, bare: LLM) -> None:
        import numpy as np

        tokenizer = Tokenizer.load(bare.config.model, required=False)
        parser = RequestParser(bare.config, tokenizer, ChatTemplate(None), 128, 199)
        assert parser.parse(WireRequest(ids_input())).engine_request.prompt_token_ids == [5, 6]
        text = {"text_input": np.array([b"a"], dtype=object)}
        for inputs, parameters in [(text, {}), (ids_input(), {"stop": "x"}), (ids_input(), {"bad_words": "x"})]:
            with pytest.raises(RequestError, match="has no tokenizer") as caught:
                parser.parse(WireRequest(inputs, parameters))
            assert caught.value.code == "INVALID_ARG"

    def test_a_tokenizer_that_was_named_must_be_there(self, bare: LLM, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError):
            LLM(str(DEMO), tokenizer=bare.config.model, **OPTIONS)
        broken = demo_copy(tmp_path / "broken")
        (broken / "tokenizer.json").write_text("{")
        with pytest.raises(TokenizerError, match="not a tokenizer"):
            LLM(str(broken), **OPTIONS)


OFFLINE = """
import sys
from inflight import LLM, SamplingParams
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.hub import checkpoint_file
llm = LLM("acme/tiny", dtype="float32", kv_cache_memory="16MiB", max_model_len=64)
print(llm.generate("Return a list of", SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].token_ids)
assert checkpoint_file("acme/tiny", "chat_template.jinja") is None
ChatTemplate.load("acme/tiny")
"""


@pytest.mark.nightly
def test_a_complete_snapshot_in_the_hubs_cache_needs_no_network(tmp_path: Path, llm: LLM) -> None:
    """It lacks the files that a checkpoint may lack, and has its weights in shards."""
    repository = tmp_path / "models--acme--tiny"
    files = repository / "snapshots" / ("a" * 40)
    shutil.copytree(DEMO, files, ignore=shutil.ignore_patterns("generation_config.json", "chat_template.jinja"))
    (files / "model.safetensors").rename(files / "model-00001-of-00001.safetensors")
    from safetensors import safe_open

    with safe_open(files / "model-00001-of-00001.safetensors", framework="pt") as tensors:
        weight_map = dict.fromkeys(tensors.keys(), "model-00001-of-00001.safetensors")
    (files / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    environment = {
        "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(tmp_path),
        "HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    expected = llm.generate("Return a list of", SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].token_ids
    assert done.stdout.splitlines()[0] == str(expected)
    assert "Retrying" not in done.stderr


def test_what_is_neither_on_the_hub_nor_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointFileError, match=r"acme/other: cannot get config\.json from the hub"):
        checkpoint_file("acme/other", "config.json")
