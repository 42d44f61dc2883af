"""Translates a structured output into a grammar of llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo.core.errors import InvalidRequest
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.schema_rewriting import rewrite_schema

if TYPE_CHECKING:
    from llguidance import LLParserLimits

SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""White space in JSON: one space behind each comma and colon, and no other. Nothing can then write
white space for ever."""


def parser_limits() -> LLParserLimits:
    """Return the limits of a grammar in trials and in workers. A mask then takes 0.3 s at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def allows_token_ids() -> bool:
    """Return whether the library checks grammars without a tokenizer that name tokens by their ids.
    vLLM checks so, and grammars of calls have such names. False without the library."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return False
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark("start: <[1]>"), None)


def grammar_text(structured: StructuredOutput) -> str:
    """Return the grammar of a structured output. Raises `InvalidRequest` where it cannot be
    translated."""
    from llguidance import LLMatcher, grammar_from

    kind, value = structured.kind, structured.value
    if kind in ("json_schema", "json_object"):
        options: dict[str, Any] = {**SEPARATORS, "coerce_one_of": True}
        if structured.whitespace_pattern:
            options = {"whitespace_pattern": structured.whitespace_pattern, "coerce_one_of": True}
        schema = value or '{"type": "object"}'
        from_schema: Any = LLMatcher.grammar_from_json_schema
        return str(from_schema(rewrite_schema(schema), overrides=options))
    if kind == "calls":
        return LLMatcher.grammar_from_lark(value)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    try:
        return grammar_from("choice" if kind == "choice" else "grammar", value)
    except ValueError as error:
        cause = error.__context__ or error
        position = getattr(getattr(cause, "pos", None), "pos", None)
        place = ""
        if isinstance(position, int):
            column = position - value.rfind("\n", 0, position)
            place = f"{value.count(chr(10), 0, position) + 1}({column}): "
        raise InvalidRequest(f"{place}{cause}") from None
