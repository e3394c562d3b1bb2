from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.frontend.chat.chat_template import ChatTemplate, ChatTemplateError
from inflight.frontend.text.tokenizer import TokenizerError

MESSAGES = [{"role": "system", "content": "be  brief"}, {"role": "user", "content": "<b> 'héllo' 你 & \"x\""}]
JSON = json.dumps(MESSAGES)

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "{%- for m in messages %}\n    {%- if loop.last %}\n  {% break %}\n{% endif %}\n{{ m | tojson }}\n{%- endfor %}\n",
    "{% for m in messages %}\n  {% generation %}\n{{ m['content'] }}{% endgeneration %}\n{% endfor %}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages | tojson(indent=2) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_renders_like_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered, _ = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True, **tokens)
    assert ChatTemplate(template, tokens).render(JSON) == rendered[0]


def test_the_template_is_loaded_from_either_file(tmp_path: Path) -> None:
    config = {"chat_template": "old {{ bos_token }}", "bos_token": {"content": "<s>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(str(tmp_path)).render(JSON) == "old <s>"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert ChatTemplate.load(str(tmp_path)).render(JSON) == "new"
    assert ChatTemplate.load(str(tmp_path), override="mine").render(JSON) == "mine"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(str(tmp_path)).render(JSON) == "plain"


def test_without_a_template_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"no chat template \(the checkpoint has none\): send text_input, or set chat_template"
    ):
        ChatTemplate.load(str(tmp_path)).render(JSON)


def test_a_template_may_reject_the_messages() -> None:
    with pytest.raises(ChatTemplateError, match="rejected the messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(JSON)
    with pytest.raises(ChatTemplateError, match="rejected the messages"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(JSON)


def test_bad_syntax_fails_the_load_in_model_json_and_only_messages_in_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja: line 2"):
        ChatTemplate.load(str(tmp_path), override="\n{% if %}").check()
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    chat = ChatTemplate.load(str(tmp_path))
    chat.check()
    with pytest.raises(ChatTemplateError, match=r"no chat template \(the chat template is not valid Jinja: line 1"):
        chat.render(JSON)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chat_template": 5}, "its chat_template is int, not a string"),
        ({"chat_template": [5]}, "the checkpoint has none"),
        ({"chat_template": [{"x": 1}]}, "the checkpoint has none"),
        ({"chat_template": "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}"}, "nested too deeply"),
        ({"chat_template": "{{ messages[9].content }}{{ messages[9].x.y }}"}, "rejected the messages"),
        ({"chat_template": "{{ 1 // 0 }}"}, "rejected the messages"),
        ({"chat_template": "{{ range(1000000000) | length }}"}, "rejected the messages"),
    ],
)
def test_an_unusable_template_does_not_affect_plain_prompts(tmp_path: Path, settings: dict, says: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": {"x": 1}}))
    with pytest.raises(ChatTemplateError, match=says):
        ChatTemplate.load(str(tmp_path)).render(JSON)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b'{"a": "\xff"}', "tokenizer_config.json: cannot be read"),
        ("special_tokens_map.json", b"[" * 100_000, "special_tokens_map.json: not valid JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=says):
        ChatTemplate.load(str(tmp_path))


def test_templates_are_sandboxed() -> None:
    with pytest.raises(ChatTemplateError, match="rejected"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(JSON)


# -- templates that requests bring ---------------------------------------------------------------------


def with_template(template: object, **more: object) -> str:
    return json.dumps({"messages": MESSAGES, "chat_template": template, **more})


@pytest.fixture(scope="module")
def trusting() -> Iterator[ChatTemplate]:
    """A checkpoint's template, and requests may bring others."""
    chat = ChatTemplate("model {{ bos_token }}", {"bos_token": "<s>"}, seconds=0.5, trusts_requests=True)
    yield chat
    chat.close()


def test_a_template_of_a_request_is_refused_unless_requests_are_trusted() -> None:
    chat = ChatTemplate("model")
    for text in (with_template("mine"), with_template("mine").replace("chat_template", "chat\\u005ftemplate")):
        with pytest.raises(ChatTemplateError, match="set trust_request_chat_template in model"):
            chat.render(text)
    assert chat.render(with_template(None)) == "model"
    with pytest.raises(ChatTemplateError, match="chat_template_kwargs may not set 'chat_template'"):
        chat.render(json.dumps({"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "mine"}}))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(None).render(with_template("mine"))


def test_a_trusted_request_brings_its_template(trusting: ChatTemplate) -> None:
    texts = {TEMPLATES[3]: "2", "{{ messages | tojson }}": json.dumps(MESSAGES, ensure_ascii=False)}
    for template, expected in texts.items():
        assert trusting.render(with_template(template)) == expected
    mine = with_template("{{ bos_token }}{{ x }}{{ tools }}", chat_template_kwargs={"x": 5}, tools=[{"a": 1}])
    assert trusting.render(mine) == "<s>5[{'a': 1}]"
    continued = json.dumps(
        {
            "messages": [{"role": "assistant", "content": "The"}],
            "continue_final_message": True,
            "chat_template": "{{ messages[0].content }}<end>",
        }
    )
    assert trusting.render(continued) == "The"
    for own in (JSON, json.dumps([{"role": "user", "content": "chat_template"}]), with_template(None)):
        assert trusting.render(own) == "model <s>"
    bare = ChatTemplate(None, trusts_requests=True)
    assert bare.render(with_template("{{ messages | length }}")) == "2", "the checkpoint has none"
    with pytest.raises(ChatTemplateError, match="the checkpoint has none"):
        bare.render(JSON)
    bare.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ raise_exception('no') }}", "rejected the messages: no"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejected the messages"),
        ("{{ messages.append(1) }}", "rejected the messages"),
        ("{% include '/etc/passwd' %}", "rejected the messages"),
        ("{{ self.__init__.__globals__ }}", "rejected the messages"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took more than 0.5 s"),
        ("{{ 9 ** (9 ** 9) }}", "took more than 0.5 s"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "chat template"),
        ("a" * (2**16 + 1), "has 65537 characters"),
        (5, "is a int"),
        (["a"], "is a list"),
    ],
)
def test_a_hostile_template_fails_alone(trusting: ChatTemplate, template: object, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        trusting.render(with_template(template))
    assert trusting.render(JSON) == "model <s>" and trusting.render(with_template("mine")) == "mine"


def test_closing_ends_the_process_for_templates_of_requests() -> None:
    chat = ChatTemplate("model", trusts_requests=True)
    chat.render(with_template("mine"))
    process = chat._for_requests
    assert process is not None and process._popen is not None
    popen = process._popen
    chat.close()
    assert popen.wait(20) is not None
