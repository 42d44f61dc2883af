"""Selectors of labels and fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object

Selector = Callable[[Object], bool]
_SET = re.compile(r"\s*([^\s!=,()]+)\s+(in|notin)\s+\(([^)]*)\)\s*")


def get_path(value: Any, path: str) -> Any:
    """Return the value at a path such as `.spec.replicas` or `.conditions[?(@.type=="A")].x`."""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        if part.startswith("[?"):
            condition = re.match(r'\[\?\(@\.(\w+)==["\'](.*?)["\']\)', part)
            key, wanted = condition.groups() if condition else ("", "")
            value = next((item for item in value or () if item.get(key) == wanted), None)
        elif part.startswith("["):
            index = int(part[1:-1]) if part[1:-1].isdigit() else 0
            value = value[index] if isinstance(value, list) and len(value) > index else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def label_selector(text: str) -> Selector:
    """Return the selector of a query's `labelSelector`."""
    terms: list[tuple[str, str, Sequence[str]]] = []
    while match := _SET.search(text):
        values = [value.strip() for value in match[3].split(",")]
        terms.append((match[1], "in" if match[2] == "in" else "notin", values))
        text = text[: match.start()] + text[match.end() :]
    for term in filter(None, (part.strip() for part in text.split(","))):
        if "!=" in term:
            key, _, value = term.partition("!=")
            terms.append((key.strip(), "notin", (value.strip(),)))
        elif "=" in term:
            key, _, value = term.replace("==", "=").partition("=")
            terms.append((key.strip(), "in", (value.strip(),)))
        else:
            terms.append((term.lstrip("!"), "absent" if term[0] == "!" else "exists", ()))
    return lambda item: matches_terms(terms, item["metadata"].get("labels") or {})


def structured_selector(selector: Object | None) -> Callable[[Mapping[str, str]], bool]:
    """Return the selector of labels in an object: matchLabels and matchExpressions."""
    operators = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "absent"}
    terms: list[tuple[str, str, Sequence[str]]] = [
        (key, "in", (value,)) for key, value in ((selector or {}).get("matchLabels") or {}).items()
    ]
    terms += [
        (term["key"], operators[term["operator"]], term.get("values") or ())
        for term in (selector or {}).get("matchExpressions") or ()
    ]
    return lambda labels: matches_terms(terms, labels)


def matches_terms(
    terms: Sequence[tuple[str, str, Sequence[str]]], labels: Mapping[str, str]
) -> bool:
    """Return whether labels satisfy all terms."""
    for key, operator, values in terms:
        value = labels.get(key)
        if operator == "exists" and value is None:
            return False
        if operator == "absent" and value is not None:
            return False
        if operator == "in" and value not in values:
            return False
        if operator == "notin" and value in values:
            return False
    return True


def field_selector(text: str) -> Selector:
    """Return the selector of a query's `fieldSelector`. Raises `ApiFailure`."""
    terms = []
    for term in filter(None, text.split(",")):
        path, equal, value = term.replace("==", "=").partition("=")
        if not equal:
            raise ApiFailure(400, f"invalid selector: {term!r}; can't understand {term!r}")
        terms.append((path.rstrip("!"), path.endswith("!"), value))
    return lambda item: all(
        (str(get_path(item, path) or "") == value) != negated for path, negated, value in terms
    )
