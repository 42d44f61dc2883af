"""Prompts of real chat templates, equal to those of transformers, and the forms they read."""

import gzip
import json
from datetime import datetime
from pathlib import Path

import pytest
from tests.unit.models.test_chat_template import CHATML

from dynamo.models.chat_template import ChatTemplate
from dynamo.models.template_forms import content_text

FOLDER = Path(__file__).parents[2] / "data" / "templates"
REFERENCE = json.loads(gzip.decompress((FOLDER / "prompts.json.gz").read_bytes()))
NAMES = sorted(REFERENCE["prompts"])
USER = {"role": "user", "content": "Hi"}
CUT = '{"value": '


def read_template(name: str) -> ChatTemplate:
    source = (FOLDER / f"{name}.jinja").read_text()
    for_tools = source if name.endswith("-tool_use") else None
    return ChatTemplate(source, for_tools, **REFERENCE["about"]["tokens"])


def call_with(arguments: str, content: str | None = None) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "18"}
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}


def test_the_reference_is_large_enough():
    assert len(NAMES) >= 40
    cases = [prompt for prompts in REFERENCE["prompts"].values() for prompt in prompts.values()]
    assert len([prompt for prompt in cases if prompt]) > 300


@pytest.mark.parametrize("name", NAMES)
def test_prompts_equal_those_of_transformers(name, monkeypatch):
    day = datetime(2026, 11, 28)  # noqa: DTZ001 - the day of the reference
    monkeypatch.setattr("dynamo.models.chat_template._strftime_now", day.strftime)
    template = read_template(name)
    for case, expected in REFERENCE["prompts"][name].items():
        if expected is not None:
            request = REFERENCE["requests"][case]
            assert template.render(request["messages"], request.get("tools", ())) == expected, case


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_no_json_stand_in_the_prompt(name):
    template = read_template(name)
    if template._plain.forms.reads_calls:
        prompt = template.render([USER, call_with(CUT), RESULT], [TOOL])
        assert '"value":' in prompt.replace("\\", "")


PARTS_ONLY = (
    "{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "call {{ ARGUMENTS }};{% endfor %}{% else %}{{ m.role + ': ' + m.content }};{% endif %}"
    "{% endfor %}{% if tools %}{% endif %}"
)
FUNCTION = "c['function']['arguments']"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "content", "prompt"),
    [
        (PARTS_ONLY, "hello", "[user]hello"),
        (PARTS_ONLY, PARTS, "[user]ab"),
        (BOTH, "hello", "hello"),
        (BOTH, PARTS, "<a><b>"),
        ("{% for m in messages %}{{ m.content + '!' }}{% endfor %}", PARTS, "a\nb!"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS, "a\nb"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", PARTS, '"a\\nb"'),
    ],
)
def test_a_content_has_the_form_that_the_template_reads(source, content, prompt):
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": content}]) == prompt


@pytest.mark.parametrize(
    ("expression", "good", "cut"),
    [
        (f"'' + {FUNCTION}", '{"a":  "é"}', CUT),
        (f"{FUNCTION}", '{"a":  "é"}', CUT),
        (f"{FUNCTION} | tojson", '{"a": "é"}', CUT),
        (f"{FUNCTION} if {FUNCTION} is string else {FUNCTION} | tojson", '{"a": "é"}', CUT),
        (
            f"{FUNCTION}.items() | list | tojson",
            '[["a", "é"]]',
            r'[["arguments", "{\"value\": "]]',
        ),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(expression, good, cut):
    template = ChatTemplate(CALLS.replace("ARGUMENTS", expression))
    for arguments, text in (('{"a":  "é"}', good), (CUT, cut)):
        prompt = template.render([USER, call_with(arguments), RESULT], [TOOL])
        assert prompt == f"user: Hi;call {text};tool: 18;"


def test_roles_that_the_template_does_not_know_are_replaced():
    strict = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('no such role') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    system, developer = ({"role": role, "content": role} for role in ("system", "developer"))
    assert ChatTemplate(strict).render([system, developer, USER]) == (
        "user:system\n\ndeveloper\n\nHi;"
    )
    assert ChatTemplate(strict).render([system]) == "user:system;"
    known = strict.replace("'user',", "'user', 'system',")
    assert ChatTemplate(known).render([developer, USER]) == "system:developer;user:Hi;"
    assert ChatTemplate(CHATML).render([developer], add_generation_prompt=False) == (
        "<|im_start|>developer\ndeveloper<|im_end|>\n"
    )


def test_ids_of_calls_are_shortened_for_templates_that_refuse_others():
    template = read_template("Mistral-Nemo-Instruct-2407")
    prompt = template.render([USER, call_with("{}"), RESULT], [TOOL])
    assert prompt.count("0000call1") == 2


def test_tools_choose_the_named_template_and_the_system_message_describes_them_elsewhere():
    named = ChatTemplate("plain", "tools: {% for t in tools %}{{ t.function.name }}{% endfor %}")
    assert (named.render([USER]), named.render([USER], [TOOL])) == ("plain", "tools: f")
    native = read_template("DeepSeek-V3.1").render([USER, call_with("{}"), RESULT], [TOOL])
    assert "<｜tool▁call▁begin｜>f" in native
    assert '"name": "f"' in native
    assert "<tool_call>" not in native
    hermes = ChatTemplate(CHATML).render([USER, call_with("{}"), RESULT], [TOOL])
    assert hermes.count("<tool_call>") == 2
    assert hermes.count("<tool_response>") == 1


def test_a_costly_template_has_the_usual_forms():
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert ChatTemplate(loop)._plain.forms == ChatTemplate(None)._plain.forms


def test_content_text():
    assert [content_text(content) for content in ("a", PARTS, None)] == ["a", "a\nb", ""]
