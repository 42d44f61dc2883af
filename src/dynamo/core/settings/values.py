"""Conversion of written values to a setting's type, with checks of unit, bounds and choices."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import msgspec

from dynamo.core.redaction import REDACTED, redact_credentials
from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.units import parse_cores, parse_gibibytes, parse_seconds, parse_size


class SourcedValue(msgspec.Struct, frozen=True):
    """A written value. `raw` is text or a value that the YAML parser returned.

    `origin` is for messages: "flag --http-port", "environment DYNAMO_SERVER__HTTP_PORT" or
    "agg.yaml:3". `written_key` is the key as the user wrote it.
    """

    raw: Any
    origin: str
    written_key: str = ""


PARSERS: Mapping[str, Callable[[str], float]] = {
    "bytes": parse_size,
    "GiB": parse_gibibytes,
    "cores": parse_cores,
    "seconds": parse_seconds,
}
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


def parse_value(spec: SettingSpec, raw: Any) -> Any:
    """Convert `raw` to the setting's type and check its bounds.

    Raises `ValueError` that states the accepted values.
    """
    kind, optional = _unwrap_optional(spec.type)
    if raw is None:
        if optional:
            return None
        raise ValueError("a value is missing")
    value = _convert(spec, kind, raw)
    _check_bounds(spec, value)
    return value


def shown_value(spec: SettingSpec, value: Any) -> Any:
    """Return `value` without secrets: neither secret settings nor credentials in URLs."""
    if spec.meta.secret and value:
        return REDACTED
    return redact_credentials(value)


def type_name(spec: SettingSpec) -> str:
    """Return "int", "float", "bool", "text", "list", "mapping" or "sections"."""
    if spec.entry_schema is not None:
        return "sections"
    kind, _ = _unwrap_optional(spec.type)
    names = {int: "int", float: "float", bool: "bool", tuple: "list", dict: "mapping"}
    return names.get(kind, "text")


def normalize_choice(choice: str) -> str:
    """Return the form in which choices are compared: case does not count, `-` equals `_`."""
    return choice.strip().lower().replace("-", "_")


def _unwrap_optional(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in {Union, types.UnionType}:
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        return arms[0], True
    return get_origin(hint) or hint, False


def _convert(spec: SettingSpec, kind: Any, raw: Any) -> Any:
    if kind is tuple:
        if spec.meta.entries:
            raw = _objects_as_texts(raw)
        return _check_items(spec, _parse_list(get_args(spec.type)[0], raw))
    if kind is dict:
        return _parse_mapping(raw)
    if kind is bool:
        return _parse_bool(raw)
    if kind is str:
        return _parse_choice(spec, raw)
    return _parse_number(spec, kind, raw)


def _parse_list(kind: Any, raw: Any) -> tuple[Any, ...]:
    if isinstance(raw, str):
        raw = split_list(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        raw = [raw]
    if not isinstance(raw, Sequence) or not all(isinstance(x, str | int | float) for x in raw):
        raise ValueError(f"wanted a list of {'texts' if kind is str else 'numbers'}")
    try:
        return tuple(kind(item) for item in raw)
    except ValueError:
        raise ValueError("wanted a list of numbers") from None


def _objects_as_texts(raw: Any) -> Any:
    """Return a list whose entries may be JSON objects, with their texts in their places."""
    items = split_list(raw) if isinstance(raw, str) else [raw] if isinstance(raw, Mapping) else raw
    if not isinstance(items, list):
        return items
    return [
        msgspec.json.encode(item).decode() if isinstance(item, Mapping) else item for item in items
    ]


def _check_items(spec: SettingSpec, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a list. Raises `ValueError` for an item that is not in its table of
    plugins, or that is repeated."""
    table = spec.meta.plugins
    if table is not None:
        for number, name in enumerate(items):
            if name not in table:
                raise ValueError(f"{name} is none of: {', '.join(table.names())}")
            if name in items[:number]:
                raise ValueError(f"{name} may be listed once")
    return items


def split_list(text: str) -> list[Any]:
    """Return the items of a list written as `a, b` or in JSON, of which an object is one. Raises
    `ValueError`."""
    if text.strip().startswith("{") and isinstance(item := _json_or_text(text), Mapping):
        return [item]
    if not text.strip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.json.decode(text, type=list[Any])
    except msgspec.DecodeError:
        raise ValueError('wanted a list: a,b or ["a", "b"]') from None


def _parse_mapping(raw: Any) -> Mapping[str, Any]:
    """Return the pairs of a mapping, of a JSON object, or of texts NAME=VALUE."""
    if isinstance(raw, str):
        raw = _json_or_text(raw) if raw.strip().startswith("{") else [raw] if raw else []
    if isinstance(raw, Mapping):
        return {_argument_name(name): value for name, value in raw.items()}
    if not isinstance(raw, list) or not all(isinstance(pair, str) and "=" in pair for pair in raw):
        raise ValueError("wanted NAME=VALUE, or a mapping")
    pairs = (pair.partition("=") for pair in raw)
    return {_argument_name(name): _json_or_text(value.strip()) for name, _, value in pairs}


def _argument_name(name: object) -> str:
    return str(name).strip().removeprefix("--").replace("-", "_")


_JSON_WORDS = {"True": True, "False": False, "None": None}


def _json_or_text(text: str) -> Any:
    if text in _JSON_WORDS:
        return _JSON_WORDS[text]
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _parse_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError("wanted true or false")
    return word in TRUE_WORDS


def _parse_choice(spec: SettingSpec, raw: Any) -> str:
    text = str(raw)
    choices = spec.meta.choices
    if not choices:
        if isinstance(raw, str | int | float) and not isinstance(raw, bool):
            return text
        raise ValueError("wanted a text (quote it)")
    by_spelling = {normalize_choice(choice): choice for choice in choices}
    by_spelling |= {normalize_choice(also): choice for also, choice in spec.meta.spellings}
    by_spelling |= {normalize_choice(later): later for later, _ in spec.meta.not_yet}
    if normalize_choice(text) not in by_spelling:
        if spec.meta.plugins is not None and text in spec.meta.plugins:
            return text
        raise ValueError(f"one of: {', '.join(choices)}")
    chosen = by_spelling[normalize_choice(text)]
    return by_spelling.get(chosen, chosen)


def _parse_number(spec: SettingSpec, kind: Any, raw: Any) -> float | int:
    if isinstance(raw, str):
        number = _parse_number_text(spec, raw)
    elif isinstance(raw, int | float) and not isinstance(raw, bool):
        number = raw
    else:
        raise ValueError("wanted a number")  # noqa: TRY004 - all wrong values raise ValueError
    if not math.isfinite(number):
        raise ValueError("wanted a finite number")
    if kind is int and int(number) != number:
        raise ValueError("wanted a whole number")
    value: float | int = kind(number)
    return value


def _parse_number_text(spec: SettingSpec, text: str) -> float | int:
    unit = spec.meta.unit
    if unit in PARSERS:
        return PARSERS[unit](text)
    if unit == "milliseconds":
        bare = text.strip().replace(".", "", 1).isdigit()
        return float(text) if bare else parse_seconds(text) * 1000
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"wanted a number{f' of {unit}' if unit else ''}") from None


def _check_bounds(spec: SettingSpec, value: Any) -> None:
    meta = spec.meta
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    unit = f" {meta.unit}" if meta.unit else ""
    if meta.ge is not None and value < meta.ge:
        raise ValueError(f"at least {meta.ge:g}{unit}")
    if meta.le is not None and value > meta.le:
        raise ValueError(f"at most {meta.le:g}{unit}")
