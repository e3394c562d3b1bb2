"""Requests for vectors: what is accepted, the prompts that are made, and errors that name the input."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from frontend_rig import demo_tokenizer

from inflight.config import EngineConfig
from inflight.engine.pooler_facts import PoolerFacts
from inflight.engine.pooling import Pooling
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parser import RequestParser
from inflight.frontend.request.pooled_prompts import PooledPrompts, most_inputs
from inflight.frontend.request.pooled_request import PooledRequest, PooledRequestReader, is_pooled
from inflight.frontend.text.tokenizer import Tokenizer

TOKENIZER = demo_tokenizer()
MAX_LEN, VOCAB = 40, 2560
EMBEDS = PoolerFacts(tasks=["embed", "score"], size=64, prompts={"query": "find "})
CLASSIFIES = PoolerFacts(
    tasks=["embed", "classify"], size=64, labels=["a", "b", "c"], pairs="tokenizer", generates=False
)
SCORES = PoolerFacts(tasks=["embed", "score", "classify"], size=64, labels=["x"], pairs="tokenizer", generates=False)
ONE = {"task": "embed", "inputs": ["a"]}
TEMPLATE = ["<|im_start|>judge\n", "{instruction}|{query}|{document}", "<|im_end|>\n"]
RERANKS = PoolerFacts(tasks=["embed", "score"], size=64, pairs="template", template=TEMPLATE)


def reader(facts: PoolerFacts, **options: Any) -> PooledRequestReader:
    config = EngineConfig.from_dict({"model": "m", **options})
    parser = RequestParser(config, TOKENIZER, ChatTemplate(None), MAX_LEN, VOCAB, generates=facts.generates)
    prompts = PooledPrompts(facts, TOKENIZER, MAX_LEN, VOCAB, most_inputs(config), config.max_input_bytes)
    return PooledRequestReader(parser, prompts, "served")


def wire(value: Any, name: str = "pooling", parameters: dict[str, Any] | None = None, **inputs: Any) -> WireRequest:
    text = value if isinstance(value, str) else json.dumps(value)
    arrays = {name: np.array([text.encode()], dtype=np.object_)}
    for key, given in inputs.items():
        arrays[key] = np.array([given.encode()], dtype=np.object_) if isinstance(given, str) else np.array([given])
    return WireRequest(arrays, parameters or {}, received=100.0)


def read(
    facts: PoolerFacts, value: Any, *args: Any, options: dict[str, Any] | None = None, **more: Any
) -> PooledRequest:
    return reader(facts, **(options or {})).read(wire(value, *args, **more))


def refused(facts: PoolerFacts, value: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(RequestError) as error:
        read(facts, value, *args, **more)
    assert error.value.code == "INVALID_ARG"
    return error.value.message


def prompts_of(request: PooledRequest) -> list[list[int]]:
    return [member.engine_request.prompt_token_ids for member in request.members]


def test_texts_and_token_ids() -> None:
    request = read(EMBEDS, {"task": "embed", "inputs": ["hello", [5, 6, 7]]})
    assert prompts_of(request) == [TOKENIZER.encode("hello"), [5, 6, 7]]
    assert request.plan.counts == [len(TOKENIZER.encode("hello")), 3]
    (first, _) = request.members
    message = first.engine_request
    assert message.attached is not None and message.attached.pooling == Pooling("embed")
    assert [member.quiet for member in request.members] == [False, True]
    assert message.params.max_tokens == 1 and not first.stream and message.arrival == 100.0


def test_scheduling_of_a_request_is_that_of_each_prompt() -> None:
    given = {"tenant": "t", "cache_salt": "s", "request_priority": 3}
    request = read(EMBEDS, {"task": "embed", "inputs": ["a", "b"]}, parameters={"timeout": 2_000_000}, **given)
    for member in request.members:
        message = member.engine_request
        assert (message.tenant, message.cache_salt, message.priority, message.deadline) == ("t", "s", 3, 102.0)
        assert member.timeout == 2.0


def test_cosine_embeds_each_distinct_text_once() -> None:
    pairs = [["q", "one"], ["q", "two"], ["one", "q"]]
    request = read(EMBEDS, {"task": "score", "inputs": pairs})
    assert prompts_of(request) == [TOKENIZER.encode(text) for text in ("q", "one", "two")]
    assert request.plan.pooling == Pooling("embed") and request.plan.pairs == [(0, 1), (0, 2), (1, 0)]
    vectors = [np.array(v, dtype=np.float32) for v in ([1, 0], [0.6, 0.8], [0, 1])]
    np.testing.assert_allclose(request.plan.results(vectors), [[0.6], [0], [0.6]], rtol=1e-6)
    assert request.plan.inputs_of(2) == 1


def test_an_instruction_is_for_queries() -> None:
    request = read(EMBEDS, {"task": "score", "inputs": [["q", "q"]], "instruction": "query"})
    assert prompts_of(request) == [TOKENIZER.encode("find q"), TOKENIZER.encode("q")]
    request = read(EMBEDS, {"task": "embed", "inputs": ["q"], "instruction": "as is: "})
    assert prompts_of(request) == [TOKENIZER.encode("as is: q")]
    assert "inputs[0]: token ids take no instruction" in refused(
        EMBEDS, {"task": "embed", "inputs": [[1]], "instruction": "query"}
    )
    assert "instruction: this checkpoint's classify takes none" in refused(
        CLASSIFIES, {"task": "classify", "inputs": ["q"], "instruction": "x"}
    )


def test_the_template_of_a_reranker() -> None:
    before, after = (TOKENIZER.encode(TEMPLATE[place], add_special_tokens=False) for place in (0, 2))
    document = "{query} is no place"
    request = read(RERANKS, {"task": "score", "inputs": [["q", document]], "instruction": "find"})
    body = TOKENIZER.encode(f"find|q|{document}", add_special_tokens=False)
    assert prompts_of(request) == [[*before, *body, *after]]
    assert request.plan.pooling == Pooling("score")
    cut = read(
        RERANKS, {"task": "score", "inputs": [["q", document]], "instruction": "find", "truncate_prompt_tokens": 12}
    )
    room = 12 - len(before) - len(after)
    assert prompts_of(cut) == [[*before, *body[:room], *after]]
    assert "leaves no room beside the template" in refused(
        RERANKS, {"task": "score", "inputs": [["q", "d"]], "truncate_prompt_tokens": 2}
    )


def test_the_pair_of_a_tokenizer() -> None:
    request = read(SCORES, {"task": "score", "inputs": [["q", "doc"]], "raw_scores": True})
    assert prompts_of(request) == [TOKENIZER.encode_pair("q", "doc")[0]]
    assert request.plan.pooling == Pooling("score", activates=False)
    long = read(SCORES, {"task": "score", "inputs": [["q", "a b c d e f g h"]], "truncate_prompt_tokens": 5})
    assert prompts_of(long) == [TOKENIZER.encode_pair("q", "a b c d e f g h")[0][:5]]


def with_ends() -> Tokenizer:
    """Characters between a start and an end token; pairs with one more between them."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing

    import inflight.frontend.text.tokenizer as module

    fast = Fast(WordLevel({chr(97 + i): i for i in range(26)} | {"[S]": 26, "[E]": 27}, unk_token="a"))
    fast.pre_tokenizer = Split("", "isolated")
    fast.post_processor = TemplateProcessing(
        single="[S] $A [E]", pair="[S] $A [E] $B [E]", special_tokens=[("[S]", 26), ("[E]", 27)]
    )
    return Tokenizer(module._Fast(fast))


def test_what_is_cut_leaves_the_special_tokens() -> None:
    prompts = PooledPrompts(SCORES, with_ends(), 8, 28, 10, 1000)
    from inflight.frontend.request.pooled_prompts import Asked

    def cut(entry: Any, task: str = "embed", **options: Any) -> list[int]:
        return prompts.plan(Asked(task, [entry], **options)).prompts[0]

    assert cut("abcdef") == [26, 0, 1, 2, 3, 4, 5, 27]
    assert cut("abcdef", truncate=5) == [26, 0, 1, 2, 27]
    assert cut("abcdef", truncate=5, side="left") == [26, 3, 4, 5, 27]
    assert cut("abcdefghi" * 1000, truncate=-1) == [26, 0, 1, 2, 3, 4, 5, 27]
    assert cut([1, 2, 3, 4], truncate=2) == [1, 2] and cut([1, 2, 3, 4], truncate=2, side="left") == [3, 4]
    assert cut(["ab", "cdefgh"], "score", truncate=-1) == [26, 0, 1, 27, 2, 3, 4, 27]
    with pytest.raises(RequestError, match=r"inputs\[0\]: truncate_prompt_tokens=5 leaves no room for the second"):
        cut(["ab", "cd"], "score", truncate=5)
    with pytest.raises(RequestError, match=r"inputs\[0\]: a prompt of 9 tokens: it must be 1 to 8 long"):
        cut("abcdefg")


@pytest.mark.parametrize(
    ("facts", "value", "message"),
    [
        (
            EMBEDS,
            {"task": "classify", "inputs": ["a"]},
            "task='classify': not a task of this checkpoint: it has",
        ),
        (CLASSIFIES, {"task": "score", "inputs": [["a", "b"]]}, "a score needs one label, and it has 3"),
        (
            PoolerFacts(lacking="it is odd"),
            {"task": "embed", "inputs": ["a"]},
            "not a task of this checkpoint: it is odd",
        ),
        (EMBEDS, {"inputs": ["a"]}, "task='': not a task"),
        (EMBEDS, {"task": "embed"}, "pooling: inputs=None: must be a list"),
        (EMBEDS, {"task": "embed", "inputs": []}, "inputs is empty"),
        (EMBEDS, {"task": "embed", "inputs": ["a", ""]}, "inputs[1]: an empty text"),
        (EMBEDS, {"task": "embed", "inputs": [[]]}, "inputs[0]: no token ids"),
        (EMBEDS, {"task": "embed", "inputs": ["a", 5]}, "inputs[1]: 5: must be a string or a list of token ids"),
        (EMBEDS, {"task": "embed", "inputs": [[1, True]]}, "inputs[0]: [1, True]: must be a string or a list"),
        (EMBEDS, {"task": "embed", "inputs": [[1, VOCAB]]}, "inputs[0]: token id 2560 is not in the vocabulary"),
        (EMBEDS, {"task": "embed", "inputs": [[1] * 41]}, "inputs[0]: a prompt of 41 tokens: it must be 1 to 40 long"),
        (EMBEDS, {"task": "embed", "inputs": ["\ud800"]}, "inputs[0]: "),
        (EMBEDS, {"task": "score", "inputs": ["a"]}, "inputs[0]: 'a': must be a pair of texts"),
        (
            EMBEDS,
            {"task": "score", "inputs": [["a", "b"], [[1], [2]]]},
            "inputs[1]: [[1], [2]]: must be a pair",
        ),
        (EMBEDS, {"task": "score", "inputs": [["a", ""]]}, "neither of them empty"),
        (
            EMBEDS,
            {"task": "embed", "inputs": ["a"], "dimensions": 8},
            "dimensions=8: this checkpoint's embeddings have 64",
        ),
        (EMBEDS, {**ONE, "dimensions": "x"}, "dimensions='x': must be an integer"),
        (EMBEDS, {"task": "score", "inputs": [["a", "b"]], "dimensions": 64}, 'only for task "embed"'),
        (EMBEDS, {**ONE, "raw_scores": True}, 'raw_scores: not for task "embed"'),
        (
            EMBEDS,
            {"task": "embed", "inputs": ["a"], "truncate_prompt_tokens": 41},
            "truncate_prompt_tokens=41: must be 1 to",
        ),
        (
            EMBEDS,
            {"task": "embed", "inputs": ["a"], "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens=0: must be 1 to",
        ),
        (EMBEDS, {**ONE, "truncation_side": "top"}, "truncation_side='top'"),
        (EMBEDS, {**ONE, "instruct": "x"}, "pooling: unknown key 'instruct'; known: task"),
        (EMBEDS, "{", "pooling: not valid JSON"),
        (EMBEDS, "[1]", "must be a JSON object"),
        (EMBEDS, "[" * 100_000, "pooling: not valid JSON"),
    ],
)
def test_refused_by_name(facts: PoolerFacts, value: Any, message: str) -> None:
    assert message in refused(facts, value)


@pytest.mark.parametrize("facts", [EMBEDS, SCORES, RERANKS])
def test_a_pair_that_cannot_be_encoded(facts: PoolerFacts) -> None:
    for pair in (["\ud800", "b"], ["a", "\ud800"]):
        assert "inputs[1]: 'utf-8' codec" in refused(facts, {"task": "score", "inputs": [["a", "b"], pair]})


@pytest.mark.parametrize("facts", [SCORES, RERANKS])
def test_of_a_long_pair_only_what_can_fit_is_tokenised(facts: PoolerFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    long, seen = "word " * 20_000, []
    for name in ("encode", "encode_pair"):
        real = getattr(TOKENIZER, name)

        def spied(*texts: Any, real: Any = real, **options: Any) -> Any:
            seen.append(sum(map(len, texts)))
            return real(*texts, **options)

        monkeypatch.setattr(TOKENIZER, name, spied)
    asked = {"task": "score", "inputs": [["query", long]]}
    assert "set truncate_prompt_tokens" in refused(facts, asked)
    assert len(read(facts, {**asked, "truncate_prompt_tokens": MAX_LEN}).plan.prompts[0]) == MAX_LEN
    assert "no room" in refused(facts, {"task": "score", "inputs": [[long, "a"]], "truncate_prompt_tokens": 8})
    assert max(seen) < len(long) / 2


def test_the_second_text_of_a_pair_is_known_and_cutting_it_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tokenizer's types, as BERT's template gives them; a text alone has no second one."""

    def typed(one: str, other: str) -> tuple[list[int], list[int]]:
        first, second = (TOKENIZER.encode(text, add_special_tokens=False) for text in (one, other))
        return [2, *first, 3, *second, 3], [0] * (len(first) + 2) + [1] * (len(second) + 1)

    monkeypatch.setattr(TOKENIZER._backend, "encode_pair", typed)
    start = len(TOKENIZER.encode("a query", add_special_tokens=False)) + 2
    for more in ({}, {"truncate_prompt_tokens": start + 3}):
        asked = {"task": "score", "inputs": [["a query", "a long document of words"]], **more}
        (member,) = read(SCORES, asked).members
        assert member.engine_request.attached is not None
        assert member.engine_request.attached.second_start == start
    (member,) = read(EMBEDS, {"task": "embed", "inputs": ["a"]}).members
    assert member.engine_request.attached is not None and member.engine_request.attached.second_start == 0


def test_texts_are_in_lower_case_where_the_checkpoint_says_so() -> None:
    lowers = PoolerFacts(tasks=["embed"], size=64, lowers=True)
    pairs = PoolerFacts(tasks=["score"], size=64, labels=["x"], pairs="tokenizer", generates=False, lowers=True)
    assert prompts_of(read(lowers, {"task": "embed", "inputs": ["A Cat"]})) == [TOKENIZER.encode("a cat")]
    (found,) = prompts_of(read(pairs, {"task": "score", "inputs": [["A", "Cat"]]}))
    assert found == TOKENIZER.encode_pair("a", "cat")[0]


def test_sizes_of_matryoshka_models() -> None:
    for sizes, good, bad in (([], 3, 65), ([8, 16], 8, 3)):
        facts = PoolerFacts(tasks=["embed"], size=64, matryoshka=sizes)
        asked = {"task": "embed", "inputs": ["a"], "dimensions": good}
        assert read(facts, asked).plan.pooling.dimensions == good
        assert f"dimensions={bad}: must be" in refused(facts, {**asked, "dimensions": bad})
    assert read(EMBEDS, {"task": "embed", "inputs": ["a"], "dimensions": 64}).plan.pooling.dimensions == 64


def test_too_many_inputs() -> None:
    asked = {"task": "embed", "inputs": ["a"] * 4}
    assert "inputs has 4 entries: at most 3" in refused(EMBEDS, asked, options={"max_pooled_inputs": 3})
    assert "at most 3 are allowed" in refused(EMBEDS, asked, options={"max_num_seqs": 1, "max_queue_size": 2})
    assert len(read(EMBEDS, asked, options={"max_num_seqs": 1, "max_queue_size": 0}).members) == 4


@pytest.mark.parametrize(("facts", "task"), [(EMBEDS, "embed"), (EMBEDS, "score"), (RERANKS, "score")])
def test_an_instruction_counts_once_for_each_input(
    facts: PoolerFacts, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tokenised as often, and the request's size says nothing of that."""
    monkeypatch.setattr(TOKENIZER, "encode", lambda *texts, **options: pytest.fail("tokenised"))
    inputs = ["a" if task == "embed" else ["a", "b"]] * 1000
    asked = {"task": task, "inputs": inputs, "instruction": "é" * 250_000, "truncate_prompt_tokens": -1}
    said = refused(facts, asked)
    assert "instruction has 500000 bytes, 500000000 for 1000 inputs: at most 8388608 are allowed" in said
    monkeypatch.undo()
    few = {**asked, "inputs": inputs[:4]}
    assert len(read(facts, few, options={"max_input_bytes": 2_000_000}).plan.counts) == 4
    assert "2000000 for 4 inputs" in refused(facts, few, options={"max_input_bytes": 1_999_999})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"stream": True}, "stream=True: vectors come in one response"),
        ({"n": 2}, "n: not for a request with pooling"),
        ({"sampling_parameters": "{}"}, "sampling_parameters: not for a request with pooling"),
        ({"text_input": "hi"}, "text_input: not for a request with pooling"),
        ({"resume_token_ids": 4}, "resume_token_ids: not for"),
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide: not for"),
        ({"embedding_request": "{}"}, "got pooling and embedding_request: give one"),
    ],
)
def test_what_concerns_text_is_refused(inputs: dict[str, Any], message: str) -> None:
    assert message in refused(EMBEDS, {"task": "embed", "inputs": ["a"]}, **inputs)
    accepted = read(EMBEDS, {"task": "embed", "inputs": ["a"]}, parameters={"id": "x"}, stream=False)
    assert len(accepted.members) == 1


def test_a_parameter_that_concerns_text_is_refused() -> None:
    asked = {"task": "embed", "inputs": ["a"]}
    assert "logprobs: not for a request with pooling" in refused(EMBEDS, asked, parameters={"logprobs": "1"})


def test_vllm_backends_request() -> None:
    facts = PoolerFacts(tasks=["embed"], size=64, matryoshka=[])
    asked = {"input": "hello", "pooling_params": {"dimensions": [8]}}
    request = read(facts, asked, "embedding_request", return_num_input_tokens=True)
    assert request.as_text and request.plan.pooling.dimensions == 8
    assert request.returns == {"return_num_input_tokens"}
    assert prompts_of(read(facts, {"input": [4, 5]}, "embedding_request")) == [[4, 5]]
    assert refused(PoolerFacts(), asked, "embedding_request") == "Model served does not support 'embed' request"
    assert "embedding_request: must be" in refused(facts, {"inputs": "x"}, "embedding_request")
    assert "dimensions='x'" in refused(
        facts, {"input": "x", "pooling_params": {"dimensions": ["x"]}}, "embedding_request"
    )


def test_a_checkpoint_without_a_head_generates_nothing() -> None:
    config = EngineConfig.from_dict({"model": "m"})
    parser = RequestParser(config, TOKENIZER, ChatTemplate(None), MAX_LEN, VOCAB, generates=False)
    text = WireRequest({"text_input": np.array([b"hi"], dtype=np.object_)})
    assert not is_pooled(text)
    with pytest.raises(RequestError, match="no language model head, so it generates no text; send the input pooling"):
        parser.parse(text)


def test_the_size_of_a_tensor_is_limited() -> None:
    assert "at most 1000 are allowed (max_input_bytes" in refused(
        EMBEDS, {"task": "embed", "inputs": ["a" * 2000]}, options={"max_input_bytes": 1000}
    )
