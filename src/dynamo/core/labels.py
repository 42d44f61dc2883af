"""Labels of workers and the constraints of requests on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LABELS_KEY = "labels"
"""Key of the labels in a request's metadata and in an instance's capabilities."""


def parse_labels(text: str) -> dict[str, str]:
    """Parse `zone=a, gpu=h100`. A name without a value means `true`."""
    parts = (part.strip() for part in text.split(",") if part.strip())
    pairs = (part.partition("=") for part in parts)
    return {name.strip(): value.strip() or "true" for name, _, value in pairs}


def satisfies_constraints(labels: Mapping[str, Any], constraints: Mapping[str, str]) -> bool:
    """Whether `labels` have the value of every constraint."""
    return all(str(labels.get(name, "")) == value for name, value in constraints.items())
