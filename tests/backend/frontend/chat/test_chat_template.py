from __future__ import annotations

import json
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
