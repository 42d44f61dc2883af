"""Grammars of calls: whatever a grammar allows, the reader of its family reads as valid calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import InvalidRequest
from dynamo.core.text import ArgumentsDelta, CallBegun, CallEnded
from dynamo.core.values import StructuredOutput
from dynamo.models.answers.call_grammar import CallGrammar, calls_expression
from dynamo.models.answers.families import FAMILIES, make_format
from dynamo.models.answers.family import Family
from dynamo.models.answers.reader import AnswerReader
from dynamo.models.grammar.matcher import GrammarCompiler
from dynamo.models.grammar.trial_process import Verdict, try_output
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo.testing.family import write_family_folder

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
    },
    "tool.send-2": {
        "type": "object",
        "properties": {
            "to": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
            "urgent": {"type": "boolean"},
        },
    },
    "now": {},
}
VARIANTS = {
    **{family.name: (family.name, "") for family in FAMILIES},
    "deepseek v3": ("deepseek", "<｜tool▁sep｜> ```json"),
    "deepseek v3.2": ("deepseek", "<｜DSML｜function_calls>"),
    "deepseek v4.1": ("deepseek", "<｜DSML｜ calls><｜DSML｜ invoke name="),
}
WITHOUT_TOKENS = {
    "kimi k3": ("kimi", ["<|open|>", "<|close|>", "<|sep|>"]),
    "mistral v3": ("mistral", ["[TOOL_CALLS]"]),
    "qwen3-hermes in letters": ("qwen3-hermes", []),
    "qwen3-xml in letters": ("qwen3-xml", []),
}


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


class Forced:
    """The grammar and the reader of one variant of a family, over the tiny tokenizer."""

    def __init__(
        self, folder: Path, source: Path, family: Family, template: str, markers: Sequence[str]
    ) -> None:
        write_family_folder(markers, folder, source)
        self.tokenizer = load_tokenizer(folder / "tokenizer.json")
        self.format = make_format(family, template, self.tokenizer.added_tokens, named=True)
        self.grammar = CallGrammar(self.format.alphabet, template)
        self.compiler = GrammarCompiler(folder / "tokenizer.json", [2])
        self._family = family
        texts = ((token, self.tokenizer.decode([token])) for token in range(600))
        self._steps = {token for token, text in texts if text[:1] in '"\n<}]'}

    def form(self, *, one_call: bool) -> StructuredOutput:
        assert self._family.write_calls is not None
        layout = self._family.write_calls(self.grammar)
        start = calls_expression(self.grammar, layout, TOOLS, one_call=one_call)
        return StructuredOutput("calls", self.grammar.write(start))

    def answer(self, form: StructuredOutput, seed: int) -> list[int] | None:
        """Return random tokens that the grammar allows; None if they have no end in sight. Tokens
        that only allow others of the grammar's own are preferred to letters of long texts."""
        matcher, chance, tokens = self.compiler.open_matcher(form), Random(seed), list[int]()
        while not matcher.finished and len(tokens) < 3000:
            mask = matcher.mask()
            assert mask is not None, matcher.error
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            ids = np.flatnonzero(bits).tolist()
            ends = [token for token in ids if token == 2 or token >= 600]
            texts = [token for token in ids if token in self._steps] or ids
            tokens.append(chance.choice(ends or (texts if chance.random() < 0.5 else ids)))
            assert matcher.feed(tokens, 0), matcher.error
        return tokens if matcher.finished else None

    def read(self, tokens: Sequence[int]) -> list[tuple[str, Any]]:
        """Return the calls of an answer, by name and arguments."""
        prompt_end = "<|start|>assistant" if self._family.first is not None else ""
        reader = AnswerReader(self.format, TOOLS, lambda written: "id", prompt_end=prompt_end)
        chars = self.format.alphabet.chars
        decoder = self.tokenizer.stream_decoder()
        events = []
        for token in tokens:
            char = chars.get(token)
            if token != 2:
                text = decoder.flush() + char if char else decoder.step(token)
                events += reader.feed(text)
        events += [*reader.feed(decoder.flush()), *reader.end(cut=False)]
        names = [event.name for event in events if isinstance(event, CallBegun)]
        arguments = [""] * len(names)
        for event in events:
            if isinstance(event, ArgumentsDelta):
                arguments[event.index] += event.text
        assert sum(isinstance(event, CallEnded) for event in events) == len(names), tokens
        assert "".join(event for event in events if isinstance(event, str)).strip() == ""
        return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def check_arguments(name: str, arguments: Any) -> None:
    """Fail for arguments that the schema of the tool does not allow."""
    schema = TOOLS[name]
    assert arguments.keys() <= schema.get("properties", {}).keys()
    assert set(schema.get("required", ())) <= arguments.keys()
    kinds = {"city": str, "unit": str, "days": int, "to": list, "urgent": bool}
    for key, value in arguments.items():
        assert type(value) is kinds[key]
    assert arguments.get("unit", "c") in ("c", "f")
    assert 1 <= arguments.get("days", 1) <= 9
    assert set(arguments.get("to", "a")) <= {"a", "b"}


@pytest.mark.parametrize("variant", [*VARIANTS, *WITHOUT_TOKENS])
def test_every_allowed_answer_is_read_as_valid_calls(
    variant: str, tiny_model: Path, tmp_path: Path
) -> None:
    name, template = VARIANTS.get(variant, (WITHOUT_TOKENS.get(variant, ("",))[0], ""))
    family = family_named(name)
    markers: Sequence[str] = family.markers
    if variant in WITHOUT_TOKENS:
        markers = WITHOUT_TOKENS[variant][1]
    elif name == "deepseek":
        markers = [marker for marker in markers if "DSML" not in marker] + ["｜DSML｜"]
    forced = Forced(tmp_path, tiny_model / "tokenizer.json", family, template, markers)
    several = forced.form(one_call=False)
    assert try_output(several) == Verdict()
    read = 0
    for seed in range(12):
        tokens = forced.answer(several, seed)
        if tokens is None:
            continue
        calls = forced.read(tokens)
        assert calls, forced.tokenizer.decode(tokens)
        read += 1
        for tool, arguments in calls:
            check_arguments(tool, arguments)
    assert read >= 4


def test_a_grammar_of_calls_that_takes_too_long_fails_its_trial() -> None:
    text = 'start: "<[77]>" <[77]> S\nS: /(x{1000}){1000}/\n'
    assert try_output(StructuredOutput("calls", text)).too_complex


def test_one_call_is_one_call(tiny_model: Path, tmp_path: Path) -> None:
    family = family_named("qwen3-hermes")
    forced = Forced(tmp_path, tiny_model / "tokenizer.json", family, "", family.markers)
    form = forced.form(one_call=True)
    answers = [tokens for seed in range(8) if (tokens := forced.answer(form, seed)) is not None]
    assert answers
    assert all(len(forced.read(tokens)) == 1 for tokens in answers)


def test_arguments_may_have_formats_of_no_standard() -> None:
    family = family_named("qwen3-hermes")
    grammar = CallGrammar(make_format(family, "", (), named=True).alphabet, "")
    tools = {"open": {"properties": {"file": {"type": "string", "format": "path"}}}}
    assert family.write_calls is not None
    start = calls_expression(grammar, family.write_calls(grammar), tools, one_call=True)
    assert try_output(StructuredOutput("calls", grammar.write(start))) == Verdict()


def test_gemma_needs_plain_types() -> None:
    family = family_named("gemma4")
    assert family.write_calls is not None
    grammar = CallGrammar(make_format(family, "", (), named=True).alphabet, "")
    tools = {"f": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}}
    with pytest.raises(InvalidRequest, match="plain type"):
        calls_expression(grammar, family.write_calls(grammar), tools, one_call=True)
