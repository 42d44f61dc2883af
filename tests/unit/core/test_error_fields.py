"""The field of an error: beside its reason, over the wire, and under another name."""

from __future__ import annotations

import pytest

from dynamo.core.errors import InvalidRequest, NoWorkers, Unsupported, decode_error, encode_error


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("a form: none", hint="leave it out", field="tools[0].type"),
        InvalidRequest("no", field="guided_json.a", param="guided_json"),
        InvalidRequest("tools: none", param="tools"),
        NoWorkers("none: all left"),
    ],
)
def test_the_wire_keeps_field_and_reason(error: InvalidRequest) -> None:
    received = decode_error(encode_error(error))
    values = [(e.message, e.reason, e.field, e.param, e.hint) for e in (error, received)]
    assert values[0] == values[1]
    assert str(received) == received.message


def test_a_field_has_the_name_of_another_request() -> None:
    error = InvalidRequest("tools[0] is none", field="tools[0].type")
    error.rename_fields(lambda field: f"input.{field}")
    assert (error.message, error.param) == (
        "input.tools[0].type: tools[0] is none",
        "input.tools[0].type",
    )
