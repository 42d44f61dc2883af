"""Rendering of chat templates and the sandbox."""

from datetime import datetime

import pytest

from dynamo.core.errors import InvalidRequest, ModelUnavailable
from dynamo.models.chat_template import ChatTemplate

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
USER = {"role": "user", "content": "Hi <b>"}


def render(source, messages=(USER,), **args):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **args)


def test_chatml_is_rendered():
    start = "<|im_start|>user\nHi <b><|im_end|>\n"
    assert render(CHATML) == start + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == start


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        (CHATML, "One, ", "<|im_start|>assistant\nOne, "),
        (CHATML, [{"type": "text", "text": "One,"}], "<|im_start|>assistant\nOne,"),
        (CHATML.replace("content", "content | trim"), " One, ", "<|im_start|>assistant\nOne,"),
        ("", "One,", "User: Hi <b>\nAssistant: One,"),
    ],
)
def test_the_text_of_the_last_message_stays_open(template, content, end):
    messages = [USER, {"role": "assistant", "content": content}]
    prompt = ChatTemplate(template).render_open(messages)
    assert prompt.endswith(end)
    assert "Hi <b>" in prompt


@pytest.mark.parametrize(
    ("template", "content", "error"),
    [(CHATML, None, "no text"), ("{{ messages[0].content }}", "One,", "leaves out")],
)
def test_a_last_message_without_text_is_not_continued(template, content, error):
    with pytest.raises(InvalidRequest, match=error):
        ChatTemplate(template).render_open([USER, {"role": "assistant", "content": content}])


def test_templates_get_variables_filters_and_functions():
    assert render("{{ bos_token }}|{{ eos_token }}|{{ x }}", x=3) == "<s>|</s>|3"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    tool = {"name": "ä <b>"}
    assert render("{{ tools | tojson }}", tools=[tool]) == '[{"name": "ä <b>"}]'
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=[tool]) == '{\n  "name": "ä <b>"\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)
    assert (
        render("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHi <b>c"


def test_the_error_message_of_a_template_reaches_the_client():
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


def test_messages_that_a_template_cannot_render_are_refused():
    assert render(CHATML, [{"role": "user", "content": None}]).startswith("<|im_start|>user\n<|im")
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        render("{{ messages[9].content.x }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_refuses_unsafe_templates(source):
    with pytest.raises(InvalidRequest):
        render(source, [dict(USER)])


def test_an_invalid_template_makes_the_model_unavailable():
    with pytest.raises(ModelUnavailable, match="chat template is invalid"):
        ChatTemplate("{% for %}")


def test_the_fallback_format_labels_roles():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be short."},
        USER,
        {"role": "assistant", "content": None},
    ]
    text = "System: Be kind.\nSystem: Be short.\nUser: Hi <b>\nAssistant: "
    assert render(None, messages) == text + "\nAssistant: "
    assert render("", messages, add_generation_prompt=False) == text
