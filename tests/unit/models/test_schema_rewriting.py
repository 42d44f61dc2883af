"""Schemas are rewritten into what can be enforced: each answer is one of the schema as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.codec import unpack_ids
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.matcher import GrammarCompiler
from dynamo.models.grammar.schema_rewriting import rewrite_schema
from dynamo.models.grammar.trial_process import try_output
from dynamo.models.tokenization.tokenizer import Tokenizer

EOS = 2
NUMBERS = {name: {"type": "integer"} for name in "abc"}


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model / "tokenizer.json", [EOS])


def objects(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": NUMBERS, "additionalProperties": False, **keywords}


def accepts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, document: dict[str, Any], value: Any
) -> bool:
    matcher = compiler.open_matcher(StructuredOutput("json_schema", json.dumps(document)))
    if not matcher.feed(unpack_ids(tokenizer.encode(json.dumps(value))), 0):
        return False
    mask = matcher.mask()
    return matcher.finished or bool(mask and mask[EOS >> 3] >> (EOS & 7) & 1)


@pytest.mark.parametrize(
    "document",
    [
        objects(dependentRequired={"a": ["b"]}),
        objects(dependencies={"a": ["b"]}),
        objects(dependencies={"a": {"required": ["b"]}, "c": []}),
        objects(dependentSchemas={"a": {"required": ["b"]}}),
        objects(dependentRequired={"a": ["b"]}, allOf=[{"required": []}]),
    ],
)
def test_a_property_requires_another_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer, document: dict[str, Any]
) -> None:
    for value, valid in [
        *(({}, True), ({"b": 1}, True), ({"c": 1}, True), ({"a": 1, "b": 2, "c": 3}, True)),
        *(({"a": 1}, False), ({"a": 1, "c": 2}, False)),
    ]:
        assert accepts(compiler, tokenizer, document, value) is valid, value


@pytest.mark.parametrize("name", ["path", "password", "binary", "color", "int32"])
def test_formats_of_no_standard_are_annotations(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    """pydantic writes `path` and `password`, OpenAPI the others."""
    document = {"type": "string", "format": name, "maxLength": 3}
    assert accepts(compiler, tokenizer, document, "abc")
    assert not accepts(compiler, tokenizer, document, "abcd")
    listed = {"type": "array", "items": document, "uniqueItems": False}
    assert accepts(compiler, tokenizer, listed, ["a", "a"])


def test_standard_formats_are_enforced_or_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    date = {"type": "string", "format": "date"}
    assert accepts(compiler, tokenizer, date, "2026-01-31")
    assert not accepts(compiler, tokenizer, date, "tomorrow")
    for document in (date | {"format": "uri-template"}, {"type": "array", "uniqueItems": True}):
        assert try_output(StructuredOutput("json_schema", json.dumps(document))).error


@pytest.mark.parametrize(
    "document",
    [
        {"type": "string", "minLength": 3},
        {"enum": [{"format": "x", "uniqueItems": False}]},
        {"properties": {"format": {"const": {"format": "path"}}, "uniqueItems": {"type": "null"}}},
        {"properties": {"dependencies": {"type": "array"}}},
    ],
)
def test_values_and_names_of_properties_stay(document: dict[str, Any]) -> None:
    assert json.loads(rewrite_schema(json.dumps(document))) == document
