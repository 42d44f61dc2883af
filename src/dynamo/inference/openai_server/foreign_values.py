"""Reads values of foreign JSON one by one: what is not as it should be counts as not there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.core.errors import DECODE_ERRORS
from dynamo.core.redaction import redact

MAX_COUNT = 1 << 31
"""A larger count is ignored."""
MAX_SHOWN_BYTES = 16 << 10
MAX_DEPTH = 8
"""Parts of a content in a part are read to this depth."""
MIN_LOGPROB = -9999.0
"""Stands for probability 0, as in the OpenAI API."""
_decode = msgspec.json.Decoder().decode
_TITLE = re.compile(r"(?is)<title[^>]*>(.{0,1000}?)</title>")
_SPACES = re.compile(r"\s+")


def decode_value(data: bytes) -> Any:
    """Return a JSON value. Invalid characters are replaced, numbers without a value are None.
    Raises `ValueError`."""
    try:
        return _decode(data)
    except DECODE_ERRORS:
        pass
    try:
        value = json.loads(
            data.decode("utf-8", "replace"),
            strict=False,
            parse_constant=lambda _: None,
            parse_float=_finite_float,
        )
        text = json.dumps(value, ensure_ascii=False)
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _finite_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(-MIN_LOGPROB, value)


def read_object(value: Any) -> Mapping[str, Any]:
    """Return an object, or {}."""
    return value if isinstance(value, dict) else {}


def read_objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list. A single object is a list of one."""
    if isinstance(value, dict):
        return [value]
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_count(value: Any) -> int | None:
    """Return a count, or None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value < MAX_COUNT:
        return value
    return None


def read_index(value: Any) -> int | None:
    """Return an index, or None. Some servers write it as text."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return read_count(value)


def read_word(value: Any) -> str:
    """Return a text, or ""."""
    return value if isinstance(value, str) else ""


def read_logprob(value: Any) -> float | None:
    """Return a logarithm of a probability, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return min(0.0, max(MIN_LOGPROB, value))


def read_text(value: Any, depth: int = 0) -> str:
    """Return a text, that of a part of a content, or those of a list of parts."""
    if isinstance(value, str):
        return value
    if depth == MAX_DEPTH:
        return ""
    if isinstance(value, list):
        return "".join(read_text(part, depth + 1) for part in value)
    if isinstance(value, dict):
        for name in ("text", "content", "thinking", "reasoning", "refusal", "value"):
            if text := read_text(value.get(name), depth + 1):
                return text
    return ""


def excerpt(body: bytes) -> str:
    """Return the beginning of a body, for a message."""
    return repr(shorten(body[:MAX_SHOWN_BYTES].decode("utf-8", "replace"), 200))


def shorten(text: str, characters: int = 300) -> str:
    """Return a text in one line, for a message, without secrets, of which a part may be cut. Of a
    page in HTML, its title says enough."""
    text = redact(text)
    if text.lstrip()[:1] == "<" and (title := _TITLE.search(text)):
        text = title[1]
    return _SPACES.sub(" ", text[: 4 * characters]).strip()[:characters]
