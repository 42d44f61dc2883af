"""The table of families, and the choice of a family for a model."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.models.answers.alphabet import MarkerAlphabet
from dynamo.models.answers.call_grammar import joined_by
from dynamo.models.answers.family import Family
from dynamo.models.answers.formats import deepseek, gemma, harmony, kimi, llama, mistral, tagged
from dynamo.models.answers.reader import AnswerFormat
from dynamo.models.tokenization.tokenizer_file import AddedToken

THINK = ("<think>", "</think>")

FAMILIES = (
    Family(
        "qwen3-xml",
        ("qwen3_coder", "qwen3_xml", "mimo"),
        reasoning=(THINK,),
        calls={
            tagged.CALL: tagged.read_tagged_call,
            tagged.FUNCTION: tagged.read_function,
        },
        layout=(tagged.CALL_END, tagged.FUNCTION_END, tagged.PARAMETER, tagged.PARAMETER_END),
        stops=("<|im_end|>", "<|endoftext|>"),
        templates=("<function=",),
        write_calls=joined_by("\n", tagged.function_call),
    ),
    Family(
        "glm",
        ("glm4", "glm4_moe", "glm45", "glm47", "glm5"),
        reasoning=(THINK,),
        calls={tagged.CALL: tagged.read_tagged_call},
        layout=(
            *(tagged.CALL_END, tagged.KEY, tagged.KEY_END, tagged.VALUE, tagged.VALUE_END),
            *("<tool_response>", "</tool_response>", "<|system|>", "<|assistant|>"),
        ),
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        templates=("<arg_key>",),
        write_calls=joined_by("\n", tagged.keyed_call),
    ),
    Family(
        "kimi",
        ("kimi_k2", "kimi-k2", "kimi_k3", "kimi-k3"),
        reasoning=(THINK,),
        calls={
            kimi.SECTION: kimi.read_section,
            kimi.CALL: kimi.read_call,
            kimi.OPEN: kimi.read_element,
            kimi.CLOSE: kimi.read_close,
        },
        shared_markers=(kimi.OPEN, kimi.CLOSE),
        layout=(
            *(kimi.SECTION_END, kimi.CALL_END, kimi.ARGUMENTS, kimi.SEPARATOR),
            *("<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        ),
        stops=("<|im_end|>", "<|end_of_msg|>"),
        templates=(kimi.SECTION, kimi.OPEN),
        opened=("<|open|>think<|sep|>",),
        closed=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        id_pattern=r"functions\.[a-zA-Z0-9_.\-]+:\d+",
        write_calls=kimi.call_layout,
    ),
    Family(
        "deepseek",
        tuple(f"deepseek{name}" for name in ("_v3", "_v31", "_v3_1", "_v32", "_v4", "_v41", "_r1")),
        reasoning=(THINK,),
        calls={
            deepseek.CALL_BEGIN: deepseek.read_json_call,
            **dict.fromkeys(deepseek.INVOKES, deepseek.read_invoke),
        },
        layout=(
            *(deepseek.CALLS_BEGIN, deepseek.CALLS_END, deepseek.CALL_END, deepseek.SEPARATOR),
            *(deepseek.SECTIONS + deepseek.INVOKE_ENDS + deepseek.PARAMETER_ENDS),
            *("<｜Assistant｜>", "<｜User｜>"),
        ),
        stops=("<｜end▁of▁sentence｜>",),
        templates=(deepseek.SEPARATOR, deepseek.DSML),
        write_calls=deepseek.call_layout,
    ),
    Family(
        "gpt-oss",
        ("harmony", "openai", "gpt_oss"),
        layout=(
            *(harmony.START, harmony.END, harmony.MESSAGE, harmony.CHANNEL, harmony.CONSTRAIN),
        ),
        stops=(harmony.CALL, harmony.RETURN),
        templates=("<|channel|>",),
        first=harmony.read_messages,
        answer_start=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        write_calls=harmony.call_layout,
    ),
    Family(
        "gemma4",
        ("gemma",),
        reasoning=((gemma.CHANNEL, gemma.CHANNEL_END),),
        calls={gemma.CALL: gemma.read_call, gemma.CHANNEL: gemma.read_channel},
        shared_markers=(gemma.CHANNEL,),
        layout=(gemma.CALL_END, gemma.QUOTE, "<tool_response|>", "<|turn>", "<|think|>"),
        stops=("<|tool_response>", "<turn|>"),
        templates=(gemma.CALL,),
        opened=("<|channel>thought",),
        write_calls=joined_by("", gemma.write_call),
    ),
    Family(
        "mistral",
        ("magistral", "ministral", "devstral"),
        reasoning=(("[THINK]", "[/THINK]"), THINK),
        calls={mistral.CALLS: mistral.read_calls},
        layout=(
            *(mistral.ARGUMENTS, mistral.CALL_ID, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        stops=("</s>",),
        templates=(mistral.CALLS,),
        id_pattern=r"[a-zA-Z0-9]{9}",
        id_chars=9,
        write_calls=mistral.call_layout,
    ),
    Family(
        "llama",
        ("llama3_json", "llama4_json", "llama3", "llama4", "pythonic", "llama4_pythonic"),
        bare_calls={"{": llama.read_object, "[": llama.read_python_calls},
        layout=(
            *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|begin_of_text|>"),
            *("<|start_header_id|>", "<|end_header_id|>", "<|header_start|>", "<|header_end|>"),
        ),
        stops=("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>", "<|end_of_text|>"),
        templates=("<|start_header_id|>", "<|header_start|>", "<|python_tag|>", "<|python_start|>"),
        write_calls=joined_by("; ", llama.object_call),
    ),
    Family(
        "qwen3-hermes",
        ("hermes", "qwen25", "qwen3"),
        reasoning=(THINK,),
        calls={tagged.CALL: tagged.read_tagged_call},
        layout=(tagged.CALL_END,),
        stops=("<|im_end|>", "<|endoftext|>"),
        templates=(tagged.CALL,),
        write_calls=joined_by("\n", tagged.hermes_call),
    ),
)
"""The families in the order in which chat templates are tried."""

FALLBACK = "qwen3-hermes"
"""The family of models whose template has no tools; prompts then describe them (`ChatTemplate`)."""


def find_family(name: str) -> Family:
    """Return the family of a name or alias. Raises `ConfigError` with the nearest name."""
    names = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}
    if name not in names:
        raise ConfigError(f"unknown tool format {name!r}", hint=nearest_name_hint(name, names))
    return names[name]


def choose_family(template: str, name: str) -> tuple[Family, str]:
    """Return the family for a chat template, and the reason. A `name` overrides the template.
    Raises `ConfigError`."""
    if name:
        return find_family(name), f"tool format {name!r} in the settings"
    for family in FAMILIES:
        for text in family.templates:
            if text in template:
                return family, f"the chat template contains {text!r}"
    return find_family(FALLBACK), "the chat template names no known format"


def make_format(
    family: Family, template: str, tokens: Sequence[AddedToken], *, named: bool
) -> AnswerFormat:
    """Return the format of a model's answers. A model reasons if its template or its vocabulary has
    a marker of reasoning, or if its family was `named`."""
    contents = {token.content for token in tokens}
    reasons = named or any(
        marker in contents or marker in template for pair in family.reasoning for marker in pair
    )
    return AnswerFormat(family, MarkerAlphabet(tokens, family.markers), reasons=reasons)
