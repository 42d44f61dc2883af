"""Conversations as agents send them: no chat template refuses or loses a part of one."""

import json

import pytest
from tests.unit.models.test_chat_template import CHATML
from tests.unit.models.test_template_forms import NAMES, TOOL, read_template

from dynamo.models import message_order
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.message_order import MessageOrder

REFUSED_BY_TRANSFORMERS = {"Kimi-K2-Thinking"}
"""Templates that use what the sandbox forbids, there as here."""
STRICT = (
    "{% set last = namespace(role='') %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    "{{ raise_exception('system') }}{% endif %}"
    "{% if m.role == last.role or m.role == 'user' and last.role == 'tool' %}"
    "{{ raise_exception('alternate') }}{% endif %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% set last.role = m.role %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %};"
    "{% endfor %}{% if tools %}{% endif %}"
)


def text(role, content):
    return {"role": role, "content": content}


def calls(*numbers, **fields):
    functions = {n: {"name": "f", "arguments": json.dumps({"q": f"arg{n}"})} for n in numbers}
    parts = [{"id": f"call_{n}", "type": "function", "function": functions[n]} for n in numbers]
    return {"role": "assistant", "content": None, "tool_calls": parts} | fields


def result(number):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result{number}"}


THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm.")
CODE_AGENT = [
    text("system", "rules"),
    text("user", "question"),
    text("system", "reminder"),
    calls(1),
    result(1),
    text("user", "note behind a result"),
    text("assistant", "answer"),
    text("user", "second question"),
]
SHELL_AGENT = [
    text("developer", "rules"),
    text("developer", "permissions"),
    text("user", "environment"),
    text("user", "question"),
    calls(1, 2, content="I look.", **THOUGHTS),
    result(2),
    result(1),
    text("assistant", "answer"),
    text("user", "second question"),
]


@pytest.mark.parametrize("conversation", [CODE_AGENT, SHELL_AGENT], ids=["code", "shell"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - REFUSED_BY_TRANSFORMERS))
def test_a_conversation_of_an_agent_is_rendered_whole(name, conversation):
    prompt = read_template(name).render(conversation, [TOOL])
    for message in conversation:
        if message["role"] != "assistant":
            assert message["content"] in prompt


STRICT_CODE_AGENT = (
    'system:rules;user:question\n\nreminder;assistant:({"q": "arg1"});'
    "tool:result1\n\nnote behind a result;assistant:answer;user:second question;"
)
STRICT_SHELL_AGENT = (
    "system:rules\n\npermissions;user:environment\n\nquestion;"
    'assistant:Hm.\n\nI look.({"q": "arg2"});tool:result2;'
    'assistant:({"q": "arg1"});tool:result1;'
    "assistant:answer;user:second question;"
)


@pytest.mark.parametrize(
    ("conversation", "prompt"),
    [
        (CODE_AGENT, STRICT_CODE_AGENT),
        (SHELL_AGENT, STRICT_SHELL_AGENT),
        (
            [text("user", "q"), text("assistant", "a"), calls(1, content="b"), result(1)],
            'user:q;assistant:a\n\nb({"q": "arg1"});tool:result1;',
        ),
        (
            [text("user", "q"), text("assistant", "a") | THOUGHTS, calls(1), result(1)],
            'user:q;assistant:Hm.\n\na({"q": "arg1"});tool:result1;',
        ),
    ],
)
def test_a_strict_template_reads_texts_in_their_places(conversation, prompt):
    assert ChatTemplate(STRICT).render(conversation, [TOOL]) == prompt


def test_a_template_that_reads_everything_gets_the_messages_as_they_are():
    assert ChatTemplate(CHATML)._plain.order is None


def test_roles_are_probed_with_tools_in_a_template_for_requests_with_tools():
    needs_tools = "{{ tools[0].function.name }}" + STRICT
    template = ChatTemplate("plain", needs_tools)
    prompt = template.render([text("developer", "rules"), text("user", "q")], [TOOL])
    assert prompt == "fsystem:rules;user:q;"


def test_many_neighbours_are_joined_at_once(monkeypatch):
    """Joining two at a time copied the texts of the first ones once for each message."""
    read = []

    def count(content):
        read.append(content)
        return content

    monkeypatch.setattr(message_order, "content_text", count)
    roles = ["system"] * 50 + ["user"] * 50
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    order = MessageOrder(joins_leading=True, alternates=True)
    system, user = order.arrange(messages)
    assert read == [message["content"] for message in messages]
    assert (system["content"].count("\n\n"), user["content"].count("\n\n")) == (49, 49)


@pytest.mark.parametrize("ids", [("a", "b", "c"), ("a", "a", "a"), (None, None, None)])
def test_results_in_any_order_follow_their_calls(ids):
    parts = [{"id": call_id, "function": {"name": str(n)}} for n, call_id in enumerate(ids)]
    results = [{"role": "tool", "tool_call_id": ids[n], "content": str(n)} for n in (1, 2)]
    arranged = MessageOrder(splits_calls=True).arrange(
        [{"role": "assistant", "content": "x", "tool_calls": parts}, *results]
    )
    names = [
        message["content"] if message["role"] == "tool" else message["tool_calls"][0]["function"]
        for message in arranged
    ]
    first = [{"name": "1"}, "1", {"name": "2"}, "2", {"name": "0"}]
    in_turn = [{"name": "0"}, "1", {"name": "1"}, "2", {"name": "2"}]
    assert names == (first if len(set(ids)) == 3 else in_turn)
