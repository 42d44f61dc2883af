"""Values of arguments that are not JSON: their types by the schema of the tool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.models.answers.values import value_to_json, value_types

SCHEMA = {
    "$defs": {"Mode": {"enum": ["a", "b"]}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "mode": {"$ref": "#/$defs/Mode"},
        "map": {"type": "object"},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "02139", "02139"),
        ("text", " true ", " true "),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("count", "7", 7),
        ("count", "None", None),
        ("count", "many", "many"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("mode", "1", "1"),
        ("map", "{'a': True}", {"a": True}),
        ("map", '{"a": 1}', {"a": 1}),
        ("other", "[1]", [1]),
        ("other", "NaN", "NaN"),
        ("other", "9" * 5000, None),
    ],
)
def test_values_get_the_type_of_the_schema(key: str, text: str, value: Any) -> None:
    json_text = value_to_json(text, value_types(SCHEMA, key), lambda _: True)
    if len(text) > 4000:
        assert json_text == text
    else:
        assert json.loads(json_text) == value


def test_a_schema_that_refers_to_itself_has_no_types() -> None:
    schema = {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/nothing"}}}
    assert value_types(schema, "a") == value_types(schema, "b") == frozenset()


def test_a_schema_whose_branches_multiply_is_read_in_part() -> None:
    branches = [{"$ref": "#/properties/a"}] * 32
    schema = {"properties": {"a": {"anyOf": branches}, "b": {"oneOf": [{"type": "null"}]}}}
    assert value_types(schema, "a") == frozenset()
    assert value_types(schema, "b") == {"null"}
