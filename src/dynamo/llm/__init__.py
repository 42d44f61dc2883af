"""The names that programs import from NVIDIA Dynamo's `dynamo.llm`, loaded on first use."""

from __future__ import annotations

from typing import Any

from dynamo._core import load_name


def __getattr__(name: str) -> Any:
    value = globals()[name] = load_name(__name__, name)
    return value
