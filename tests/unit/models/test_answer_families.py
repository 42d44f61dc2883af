"""The table of model families: their names, and how a chat template chooses one."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ConfigError
from dynamo.models.answers.families import FAMILIES, choose_family, find_family


def test_every_alias_names_a_family() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.aliases)]
    assert len(names) == len(set(names))
    assert {find_family(name).name for name in names} == {family.name for family in FAMILIES}
    assert find_family("qwen3_coder").name == "qwen3-xml"
    with pytest.raises(ConfigError) as caught:
        find_family("herms")
    assert "hermes" in caught.value.hint


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("... <tool_call>\n{{ call | tojson }}\n</tool_call>", "qwen3-hermes"),
        ("<tool_call>\n<function={{ name }}>", "qwen3-xml"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<｜tool▁sep｜>", "deepseek"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss"),
        ("<|tool_call>call:", "gemma4"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>", "llama"),
        ("{{ messages }}", "qwen3-hermes"),
    ],
)
def test_the_chat_template_chooses_the_family(template: str, family: str) -> None:
    assert choose_family(template, "")[0].name == family
    assert choose_family(template, "openai")[0].name == "gpt-oss"


def test_no_marker_of_calls_alone_is_part_of_reasoning() -> None:
    """Where no tool may be called, these markers are banned."""
    for family in FAMILIES:
        alone = set(family.calls) - set(family.shared_markers)
        pairs = [marker for pair in family.reasoning for marker in pair]
        for text in (*pairs, *family.opened, family.answer_start):
            assert not [marker for marker in alone if marker in text]
