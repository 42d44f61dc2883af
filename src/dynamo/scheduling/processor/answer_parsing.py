"""AnswerParsing: how the answers of one model are read, and the reader of each answer."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest, Unsupported
from dynamo.core.fast_path import TokenTexts
from dynamo.core.text import ChatRequest, TextOptions
from dynamo.core.values import StructuredOutput
from dynamo.models.answers.call_grammar import CallGrammar, calls_expression, closed
from dynamo.models.answers.families import FALLBACK, choose_family, make_format
from dynamo.models.answers.reader import AnswerReader
from dynamo.models.card import ModelCard
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.scheduling.processor.vocabulary import Vocabulary

log = logging.getLogger(__name__)

CALL_ID_CHARS = 24
MAX_PARAMETERS_CHARS = 64 << 10
MAX_GRAMMAR_CHARS = 1 << 20
BANNED = -100.0
"""The `logit_bias` of a token that no answer has."""
ANY_ARGUMENTS = {"additionalProperties": True}
"""The schema of functions that are not strict."""


class AnswerParsing:
    """The format of one model's answers.

    `description`: the family, and why that one. `always`: answers are read even if the request has
    no tools. `chars` maps special tokens to the characters that readers see. `token_texts` has the
    texts of tokens in which no marker begins. `stop_token_ids` are the family's.
    Raises `ConfigError` for an unknown format.
    """

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, vocabulary: Vocabulary, rng: Random
    ) -> None:
        template, name = card.tool_template or card.chat_template or "", card.tool_format
        family, reason = choose_family(template, name)
        self.description = f"{family.name}: {reason}"
        self._format = make_format(family, template, tokenizer.added_tokens, named=bool(name))
        self._family = family
        self._template = template
        self._answer_start = tokenizer.encode(family.answer_start) if family.answer_start else b""
        self._rng = rng
        search = self._format.search
        self.token_texts = TokenTexts(
            [
                None if text is None or search(text) is not None else text
                for text in vocabulary.token_texts.texts
            ]
        )
        self.chars: Mapping[int, str] = self._format.alphabet.chars
        fallback = family.name == FALLBACK and "tools" not in template and not name
        self.always = not fallback or bool(self._format.openings)
        ids = {token.content: token.id for token in tokenizer.added_tokens}
        self.stop_token_ids = tuple(ids[stop] for stop in family.stops if stop in ids)
        call_markers = set(family.calls) - set(family.shared_markers)
        self._call_bans = {ids[marker]: BANNED for marker in call_markers if marker in ids}
        fields = {"model": card.name, "format": family.name, "reason": reason}
        log.info("tool calls are read", extra={"fields": fields})

    def prepare(self, request: ChatRequest, prompt_end: str) -> Callable[[], AnswerReader]:
        """Return a function that makes the reader of one choice."""
        return partial(
            AnswerReader,
            self._format,
            _callable_tools(request),
            self._make_call_id,
            prompt_end=prompt_end,
            one_call=not request.parallel_tool_calls,
        )

    def ban_calls(self, options: TextOptions) -> TextOptions:
        """Return options by which no answer writes a token that begins a call."""
        bias = self._call_bans | (options.sampling.logit_bias or {})
        return replace(options, sampling=replace(options.sampling, logit_bias=bias))

    def argument_outputs(self, request: ChatRequest) -> Iterator[tuple[StructuredOutput, str]]:
        """Yield the structured output of the arguments of each function whose calls are
        constrained, with the place of its schema in the request. Raises `InvalidRequest`."""
        names = request.callable_tools
        for index, tool in enumerate(request.tools if request.call_mode != "free" else ()):
            function = tool["function"]
            if names is not None and function["name"] not in names:
                continue
            if request.call_mode != "strict" or function.get("strict") is True:
                field = f"tools[{index}].function.parameters"
                schema = msgspec.json.encode(closed(function.get("parameters"))).decode()
                if len(schema) > MAX_PARAMETERS_CHARS:
                    raise InvalidRequest(
                        f"{len(schema):,} characters, limit {MAX_PARAMETERS_CHARS:,} "
                        "where calls are forced or strict",
                        field=field,
                    )
                yield StructuredOutput("json_schema", schema), field

    def constrain(self, request: ChatRequest, prompt_end: str) -> StructuredOutput | None:
        """Return a structured output that is read: calls, the output of the request, or either. The
        output begins behind the reasoning, which may have a limit. Raises `Unsupported`."""
        wanted, tools = request.options.structured, _callable_tools(request)
        structured = None if wanted is None or wanted.kind == "text" else wanted
        if tools and (request.call_mode != "free" or structured is not None):
            structured = self._call_output(request, tools, structured)
        if wanted is not None and wanted.reasoning_limit is not None:
            structured = structured or StructuredOutput("text")
            structured = replace(
                structured, reasoning_limit=wanted.reasoning_limit, soft_limit=wanted.soft_limit
            )
        return None if structured is None else self._place_behind_reasoning(structured, prompt_end)

    def _place_behind_reasoning(
        self, structured: StructuredOutput, prompt_end: str
    ) -> StructuredOutput | None:
        """Return the structured output with the markers of the reasoning before it. Raises
        `Unsupported`."""
        placed = self.mark_reasoning(structured, prompt_end)
        if placed is not structured and placed.reasoning_end != self._answer_start:
            return placed  # a limit can force the token that ends the reasoning
        placed = _without_limit(placed)
        return None if placed.kind == "text" else placed

    def mark_reasoning(self, structured: StructuredOutput, prompt_end: str) -> StructuredOutput:
        """Return the structured output with the markers of the reasoning before it, or itself where
        nothing marks reasoning. Raises `Unsupported` for one whose end is no token."""
        if structured.kind not in ("calls", "text") and self._answer_start:
            return replace(structured, reasoning_end=self._answer_start)
        inside = self._format.begins_in_reasoning(prompt_end)
        tokens = {char: token for token, char in self.chars.items()}
        pairs = [tuple(map(self._format.alphabet.mark, pair)) for pair in self._family.reasoning]
        for opening, closing in pairs if self._format.openings else ():
            if opening in tokens and closing in tokens:
                start = b"" if inside else pack_ids([tokens[opening]])
                return replace(
                    structured, reasoning_start=start, reasoning_end=pack_ids([tokens[closing]])
                )
        if inside and structured.kind != "text":
            raise Unsupported(
                "the model's reasoning does not end in a token of its own", field="response_format"
            )
        return structured

    def _call_output(
        self, request: ChatRequest, tools: dict[str, Any], structured: StructuredOutput | None
    ) -> StructuredOutput | None:
        """Return the structured output of calls. None: nothing marks where strict calls of the
        family begin, so that they cannot be enforced. Raises `Unsupported`."""
        write_calls, mode = self._family.write_calls, request.call_mode
        optional = mode == "strict" and structured is None
        if optional and not (write_calls and self._family.calls):
            return None
        if write_calls is None:
            raise Unsupported(
                f"no grammar of calls is known for the format {self._family.name!r}",
                field="tool_choice",
            )
        grammar = CallGrammar(self._format.alphabet, self._template)
        layout = write_calls(grammar)
        if mode in ("strict", "free"):
            strict = _strict_names(request)
            tools = {name: tools[name] if name in strict else ANY_ARGUMENTS for name in tools}
        one_call = mode == "named" or not request.parallel_tool_calls
        start = calls_expression(grammar, layout, tools, one_call=one_call)
        if structured is not None:
            start = f"{start} | {_output_expression(grammar, structured)}"
        elif mode == "strict":
            text = grammar.text_without(tuple(self._family.calls))
            start = f"{text} ({start} {text}){'?' if one_call else '*'}"
        written = grammar.write(start)
        if len(written) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the grammar of their calls has {len(written):,} characters, limit "
                f"{MAX_GRAMMAR_CHARS:,}",
                hint="offer fewer functions, or shorter schemas",
                field="tools",
            )
        return StructuredOutput("calls", written, optional=optional)

    def _make_call_id(self, written: str) -> str:
        """Return the id that the model wrote, if its family writes such ids, else a new one."""
        family = self._family
        if family.id_pattern and re.fullmatch(family.id_pattern, written):
            return written
        letters = string.ascii_letters + string.digits
        chars = self._rng.choices(letters, k=family.id_chars or CALL_ID_CHARS)
        return "".join(chars) if family.id_chars else "call_" + "".join(chars)


def _callable_tools(request: ChatRequest) -> dict[str, Any]:
    """Return the schemas of the parameters of the functions that an answer may call, by name."""
    names = request.callable_tools
    functions = [tool["function"] for tool in request.tools]
    return {
        function["name"]: function.get("parameters") or {}
        for function in functions
        if names is None or function["name"] in names
    }


def _without_limit(structured: StructuredOutput) -> StructuredOutput:
    """Return a structured output without a limit of reasoning. Raises `Unsupported` for one that
    must hold."""
    if structured.reasoning_limit is not None and not structured.soft_limit:
        raise Unsupported(
            "this model has no tokens that begin and end its reasoning",
            hint="leave it out, and bound the tokens of the answer",
            field="thinking_token_budget",
        )
    return replace(structured, reasoning_limit=None)


def _strict_names(request: ChatRequest) -> set[str]:
    functions = (tool["function"] for tool in request.tools)
    return {function["name"] for function in functions if function.get("strict") is True}


def _output_expression(grammar: CallGrammar, structured: StructuredOutput) -> str:
    """Return the expression of a structured output that an answer may have instead of calls."""
    if structured.whitespace_pattern:
        raise Unsupported(
            "not together with tools",
            hint='set tool_choice to "none", or leave the pattern out',
            field="structured_outputs.whitespace_pattern",
            param="structured_outputs",
        )
    if structured.kind in ("json_schema", "json_object"):
        return grammar.json(msgspec.json.decode(structured.value or '{"type": "object"}'))
    if structured.kind == "choice":
        return " | ".join(map(grammar.literal, msgspec.json.decode(structured.value)))
    raise Unsupported(
        "not together with tools",
        hint='set tool_choice to "none", or use a JSON schema',
        field=f"structured_outputs.{structured.kind}",
        param="structured_outputs",
    )
