"""The fields that prescribe a structured output."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.application.openai.generation_body import STRUCTURE_FIELDS
from dynamo.application.openai.structured import read_structured_output, structured_output_fields
from dynamo.core.errors import InvalidRequest
from dynamo.core.values import StructuredOutput

SCHEMA = {"type": "object"}
OPENAI_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
AS_JSON = StructuredOutput("json_schema", '{"type":"object"}')


def read(**fields: Any) -> StructuredOutput | None:
    return read_structured_output(dict.fromkeys(STRUCTURE_FIELDS) | fields)[0]


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        ({"response_format": OPENAI_SCHEMA}, AS_JSON),
        ({"structured_outputs": {"json": SCHEMA}}, AS_JSON),
        ({"guided_json": '{"type": "object"}'}, AS_JSON),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput("choice", '["a","b"]')),
        ({"guided_grammar": "root ::= x"}, StructuredOutput("grammar", "root ::= x")),
    ],
)
def test_forms_are_read_and_written(
    fields: dict[str, Any], structured: StructuredOutput | None
) -> None:
    assert read(**fields) == structured
    if structured is not None:
        assert read(**structured_output_fields(structured)) == structured


def test_a_limit_of_reasoning_is_written_unless_it_is_soft() -> None:
    form = StructuredOutput("json_object", reasoning_limit=5)
    assert structured_output_fields(form)["thinking_token_budget"] == 5
    limit = StructuredOutput("text", reasoning_limit=0)
    assert structured_output_fields(limit) == {"thinking_token_budget": 0}
    assert structured_output_fields(replace(limit, soft_limit=True)) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": 5},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": []},
        {"structured_outputs": {"jsn": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": "{"},
        {"guided_json": 3},
        {"guided_regex": ""},
        {"guided_regex": "a" * (1 << 17)},
        {"guided_choice": []},
        {"guided_choice": ["a", 1]},
        {"guided_regex": "a", "guided_choice": ["a"]},
    ],
)
def test_wrong_forms_are_refused_with_their_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param in fields
