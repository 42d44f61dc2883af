"""The fields of a body that prescribe a structured output: `response_format`, and vLLM's
`structured_outputs` and `guided_...`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import InvalidRequest, nearest_name_hint
from dynamo.core.values import StructuredOutput, StructureKind

MAX_STRUCTURE_BYTES = 64 << 10
MAX_CHOICES = 1024


def read_structured_output(fields: Mapping[str, Any]) -> tuple[StructuredOutput | None, str]:
    """Return the structured output that these fields of a body prescribe, and the name of its
    field; None for any text. Raises `InvalidRequest` for a wrong value and for more than one
    output."""
    forms: list[tuple[str, StructuredOutput]] = []
    for name, value in fields.items():
        try:
            forms += [(name, form) for form in _read_field(name, value)]
        except InvalidRequest as error:
            error.param = name
            raise
    if len(forms) > 1:
        raise InvalidRequest(
            f"an answer has one structured output, not also that of {forms[0][0]}",
            field=forms[1][0],
        )
    return (forms[0][1], forms[0][0]) if forms else (None, "")


def structured_output_fields(structured: StructuredOutput) -> dict[str, Any]:
    """Return the fields of a body that prescribe this structured output. A soft limit of reasoning
    is left out: bodies have none."""
    limit = None if structured.soft_limit else structured.reasoning_limit
    budget = {} if limit is None else {"thinking_token_budget": limit}
    if structured.kind == "text":
        return budget
    if structured.kind == "json_object":
        return {"response_format": {"type": "json_object"}} | budget
    form = "json" if structured.kind == "json_schema" else structured.kind
    value = msgspec.json.decode(structured.value) if form == "choice" else structured.value
    fields: dict[str, Any] = {form: value}
    if structured.whitespace_pattern:
        fields["whitespace_pattern"] = structured.whitespace_pattern
    return {"structured_outputs": fields} | budget


def _read_field(name: str, value: Any) -> Iterator[StructuredOutput]:
    if value is None:
        return
    if name == "response_format":
        yield from _read_response_format(value)
    elif name == "structured_outputs":
        if not isinstance(value, Mapping):
            raise InvalidRequest("expected an object", field="structured_outputs")
        white = value.get("whitespace_pattern")
        if white is not None:
            _text(white, "structured_outputs.whitespace_pattern")
        for key, form in value.items():
            if key == "whitespace_pattern" or form is None:
                continue
            if key not in _FORMS:
                hint = nearest_name_hint(str(key), _FORMS)
                raise InvalidRequest("no such kind", hint=hint, field=f"structured_outputs.{key}")
            structured = _structured(key, form, f"structured_outputs.{key}")
            yield replace(structured, whitespace_pattern=white) if white else structured
    else:
        yield _structured(name.removeprefix("guided_"), value, name)


def _read_response_format(value: Any) -> Iterator[StructuredOutput]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return
    if kind == "json_object":
        schema = value.get("schema", value.get("value"))  # as in llama.cpp, and in TGI
        if schema is None:
            yield StructuredOutput("json_object")
        else:
            yield _structured("json", schema, "response_format.schema")
    elif kind == "json_schema":
        schema = value.get("json_schema")
        if not isinstance(schema, Mapping) or "schema" not in schema:
            raise InvalidRequest(
                "expected an object with `schema`", field="response_format.json_schema"
            )
        yield _structured("json", schema["schema"], "response_format.json_schema.schema")
    else:
        raise InvalidRequest(
            "expected text, json_object or json_schema", field="response_format.type"
        )


def _structured(form: str, value: Any, field: str) -> StructuredOutput:
    kind, check = _FORMS[form]
    text = check(value, field)
    if len(text.encode()) > MAX_STRUCTURE_BYTES:
        size = f"{len(text.encode()):,} bytes, limit {MAX_STRUCTURE_BYTES:,}"
        raise InvalidRequest(size, field=field)
    return StructuredOutput(kind, text)


def _schema(value: Any, field: str) -> str:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise InvalidRequest(str(error), field=field) from None
    if not isinstance(value, Mapping):
        raise InvalidRequest("expected a JSON schema", field=field)
    return msgspec.json.encode(value).decode()


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest("expected a text", field=field)
    return value


def _choices(value: Any, field: str) -> str:
    texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    if not texts or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"expected 1 to {MAX_CHOICES:,} texts", field=field)
    return msgspec.json.encode(value).decode()


def _any_object(value: Any, field: str) -> str:
    if value is not True:
        raise InvalidRequest("expected true", field=field)
    return ""


_FORMS: dict[str, tuple[StructureKind, Callable[[Any, str], str]]] = {
    "json": ("json_schema", _schema),
    "regex": ("regex", _text),
    "choice": ("choice", _choices),
    "grammar": ("grammar", _text),
    "json_object": ("json_object", _any_object),
}
