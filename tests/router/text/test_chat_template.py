"""A chat template writes what its checkpoint's authors meant, and can do nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.base.errors import ConfigError, RequestError
from common.checkpoint.files import DirectoryFiles
from router.text.chat_template import ChatTemplate, load_chat_template
from router.text.formats.shapes import ToolFormat

ROOT = Path(__file__).parents[3]
MESSAGES = [{"role": "user", "content": "<schöne> Grüße {{ 7 * 7 }}"}, {"role": "assistant", "content": "a\n"}]
QWEN_LIKE = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {%- set ns.last = loop.index0 %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string and not message.content.startswith('<tool>') %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
    {{- message | tojson(indent=2) }}
{%- endfor %}
{%- generation %}{{ ns.last }}{% endgeneration %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_LIKE = """{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'user' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- date_string + "\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- message['content'] | trim }}
{%- endfor %}
"""
TOOLS = [{"type": "function", "function": {"name": "grüße", "parameters": {"type": "object"}}}]


def rendered(source: str, max_chars: int = 1000, **options: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(MESSAGES, options, max_chars)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True, "enable_thinking": False}])
def test_it_writes_what_transformers_writes(options: dict[str, Any]) -> None:
    texts, _ = render_jinja_template([MESSAGES], chat_template=QWEN_LIKE, **options)
    assert rendered(QWEN_LIKE, **options) == texts[0]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("options", [{}, {"date_string": "today"}])
def test_it_writes_what_transformers_writes_of_tools(options: dict[str, Any], tools: list[Any]) -> None:
    texts, _ = render_jinja_template([MESSAGES], chat_template=LLAMA_LIKE, tools=tools or None, **options)
    assert ChatTemplate(LLAMA_LIKE, {}).render(MESSAGES, options, 1000, tools) == texts[0]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 2 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('x' * 10000) }}", "xxx"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a\\ud800' }}", "not valid Unicode"),
        ("{% if %}", "Expected an expression"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
    ],
)
def test_a_template_that_does_not_work_is_an_error_of_the_request(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        rendered(source)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "chat_template_error")
    assert len(caught.value.message) < 400


def test_a_prompt_of_too_many_characters_is_too_long() -> None:
    with pytest.raises(RequestError, match="more than 1000 characters") as caught:
        rendered("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}")
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "context_length_exceeded")


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_what_is_hidden_has_no_text(source: str) -> None:
    assert rendered(source) == ""


@pytest.mark.parametrize(
    "name", ["enable_thinkin", "messages", "tools", "eos_token", "range", "raise_exception", "\ud800"]
)
def test_an_option_that_the_template_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="enable_thinking") as caught:
        rendered(QWEN_LIKE, **{name: True})
    assert caught.value.code == "unknown_field"
    json.dumps(vars(caught.value), ensure_ascii=False).encode()


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert load_chat_template(DirectoryFiles(tmp_path)) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}))
    assert load_chat_template(DirectoryFiles(tmp_path)) is None

    def found(template: Any) -> str:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
        loaded = load_chat_template(DirectoryFiles(tmp_path))
        assert loaded is not None
        return loaded.render([], {}, 100)

    assert found("{{ bos_token }}{{ eos_token }}{{ pad_token }}") == "<s></s>"
    assert found([{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]) == "b"
    (tmp_path / "chat_template.jinja").write_text("of its own file")
    assert found("x") == "of its own file"


@pytest.mark.parametrize("field", ["chat_template", "bos_token"])
def test_a_template_that_is_not_unicode_is_an_error_of_the_model(tmp_path: Path, field: str) -> None:
    config = {"chat_template": "{{ bos_token }}", "bos_token": "<s>"} | {field: "\ud800"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: its texts are not valid Unicode"):
        load_chat_template(DirectoryFiles(tmp_path))


def test_the_demo_models_chat_is_a_dialogue() -> None:
    template = load_chat_template(DirectoryFiles(ROOT / "deploy" / "demo_model"))
    assert template is not None
    messages = [{"role": "system", "content": "A garden."}, {"role": "user", "content": "What light is that?"}]
    text = template.render(messages, {"add_generation_prompt": True}, 1000)
    assert text == "A garden.\n\nROMEO:\nWhat light is that?\n\nJULIET:\n"


def test_the_demo_models_template_knows_tools() -> None:
    template = load_chat_template(DirectoryFiles(ROOT / "deploy" / "demo_model"))
    assert template is not None and template.tool_format is ToolFormat.HERMES
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in (("a", {"b": 1}), ("c", '{"'))]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Gone."},
    ]
    tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}]
    written = template.render(messages, {"add_generation_prompt": True}, 1000, tools)
    told, _, said = written.partition("ROMEO:")
    assert told.endswith('{"name": "a", "parameters": {}}\n\n')
    one, other = (f'<tool_call>\n{{"name": {call}}}\n</tool_call>' for call in
                  ('"a", "arguments": {"b": 1}', '"c", "arguments": {"'))  # fmt: skip
    assert said == f"\nGo.\n\nJULIET:\n{one}\n{other}\n\nMessenger:\nGone.\n\nJULIET:\n"


@pytest.mark.parametrize(
    ("source", "tool_format"),
    [
        ("{% for c in calls %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}", ToolFormat.HERMES),
        ("<tool_call>\n<function=' + name + '>\n<parameter=a>", ToolFormat.XML),
        ("none", ToolFormat.NONE),
    ],
)
def test_the_format_of_calls_is_that_of_the_template(source: str, tool_format: ToolFormat) -> None:
    assert ChatTemplate(source, {}).tool_format is tool_format
