"""Constants and the loop of the client programs. A program prints a JSON line for each case."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

SCRIPT_URL = os.environ.get("SCRIPT_URL", "")
"""A deployment that answers with recorded output: a question about the weather, then its answer."""
NATIVE_URL = os.environ.get("NATIVE_URL", "")
"""A deployment of the default model and `all-MiniLM-L6-v2`."""
KEY = "any"
QUESTION = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
REASONING = "I need data."
ANSWER = "It is 18 degrees in Paris."
EMBEDDING_MODEL = "all-MiniLM-L6-v2"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the error of this kind that a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def run(*cases: Callable[[], None]) -> None:
    """Run all cases. The line of a case has its name, and its traceback if it failed."""
    for case in cases:
        error = None
        try:
            case()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"case": case.__name__, "error": error}), flush=True)
