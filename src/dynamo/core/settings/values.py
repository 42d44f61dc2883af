"""From what a person wrote to a setting's value: type, unit, bounds, choices."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import msgspec

from dynamo.core.settings.declare import Declared
from dynamo.core.settings.units import parse_cores, parse_gibibytes, parse_seconds, parse_size

PARSERS: Mapping[str, Callable[[str], float]] = {
    "bytes": parse_size,
    "GiB": parse_gibibytes,
    "cores": parse_cores,
    "seconds": parse_seconds,
}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def value_of(declared: Declared, raw: Any) -> Any:
    """`raw` (text, or what YAML made of it) as the setting's type, within its bounds.

    Raises `ValueError` with what was wanted.
    """
    kind, optional = _kind(declared.type)
    if raw is None:
        if optional:
            return None
        raise ValueError("a value is missing")
    value = _read(declared, kind, raw)
    _check(declared, value)
    return value


def type_name(declared: Declared) -> str:
    """ "int", "float", "bool", "text", "list" or "sections"."""
    if declared.entries is not None:
        return "sections"
    kind, _ = _kind(declared.type)
    names = {int: "int", float: "float", bool: "bool", tuple: "list"}
    return names.get(kind, "text")


def spelled_alike(mode: str) -> str:
    """A choice as it is compared: case, `-` and `_` are equal."""
    return mode.strip().lower().replace("-", "_")


def _kind(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in {Union, types.UnionType}:
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        return arms[0], True
    return get_origin(hint) or hint, False


def _read(declared: Declared, kind: Any, raw: Any) -> Any:
    if kind is tuple:
        return _list(get_args(declared.type)[0], raw)
    if kind is bool:
        return _flag(raw)
    if kind is str:
        return _choice(declared, raw)
    return _number(declared, kind, raw)


def _list(kind: Any, raw: Any) -> tuple[Any, ...]:
    if isinstance(raw, str):
        raw = parts_of(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        raw = [raw]
    if not isinstance(raw, Sequence) or not all(isinstance(one, str | int | float) for one in raw):
        raise ValueError(f"wanted a list of {'texts' if kind is str else 'numbers'}")
    try:
        return tuple(kind(one) for one in raw)
    except ValueError:
        raise ValueError("wanted a list of numbers") from None


def parts_of(text: str) -> list[Any]:
    """Of a list written as `a, b` or in JSON. Raises ValueError."""
    if not text.strip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.json.decode(text, type=list[Any])
    except msgspec.DecodeError:
        raise ValueError('wanted a list: a,b or ["a", "b"]') from None


def _flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError("wanted true or false")
    return word in _TRUE


def _choice(declared: Declared, raw: Any) -> str:
    text = str(raw)
    choices = declared.about.choices
    if not choices:
        if isinstance(raw, str | int | float) and not isinstance(raw, bool):
            return text
        raise ValueError("wanted a text (quote it)")
    alike = {spelled_alike(choice): choice for choice in choices}
    alike |= {spelled_alike(also): choice for also, choice in declared.about.spellings}
    alike |= {spelled_alike(later): later for later, _ in declared.about.not_yet}
    if spelled_alike(text) not in alike:
        raise ValueError(f"one of: {', '.join(choices)}")
    chosen = alike[spelled_alike(text)]
    return alike.get(chosen, chosen)


def _number(declared: Declared, kind: Any, raw: Any) -> float | int:
    if isinstance(raw, str):
        number = _parsed(declared, raw)
    elif isinstance(raw, int | float) and not isinstance(raw, bool):
        number = raw
    else:
        raise ValueError("wanted a number")  # noqa: TRY004 - one kind for all that is wrong
    if not math.isfinite(number):
        raise ValueError("wanted a finite number")
    if kind is int and int(number) != number:
        raise ValueError("wanted a whole number")
    value: float | int = kind(number)
    return value


def _parsed(declared: Declared, text: str) -> float | int:
    unit = declared.about.unit
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


def _check(declared: Declared, value: Any) -> None:
    about = declared.about
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    unit = f" {about.unit}" if about.unit else ""
    if about.ge is not None and value < about.ge:
        raise ValueError(f"at least {about.ge:g}{unit}")
    if about.le is not None and value > about.le:
        raise ValueError(f"at most {about.le:g}{unit}")
