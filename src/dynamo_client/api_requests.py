"""The calls of the API as values: path and body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_client.session import RequestSpec

Message = Mapping[str, Any]
Prompt = str | Sequence[str] | Sequence[int]

LIST_MODELS = RequestSpec("/v1/models")
HEALTH_CHECK = RequestSpec("/health")


def chat(
    messages: Sequence[Message], model: str, stream: bool, options: dict[str, Any]
) -> RequestSpec:
    """/v1/chat/completions."""
    body = {"model": model, "messages": messages, "stream": stream}
    return _request_spec("/v1/chat/completions", body, options)


def completion(prompt: Prompt, model: str, stream: bool, options: dict[str, Any]) -> RequestSpec:
    """/v1/completions."""
    return _request_spec(
        "/v1/completions", {"model": model, "prompt": prompt, "stream": stream}, options
    )


def tokenize(text: str | Sequence[Message], model: str) -> RequestSpec:
    """/tokenize, of a text or of messages."""
    key = "prompt" if isinstance(text, str) else "messages"
    return _request_spec("/tokenize", {"model": model, key: text}, {})


def detokenize(tokens: Sequence[int], model: str) -> RequestSpec:
    """/detokenize."""
    return _request_spec("/detokenize", {"model": model, "tokens": tokens}, {})


def _request_spec(path: str, body: dict[str, Any], options: dict[str, Any]) -> RequestSpec:
    request_id = options.pop("request_id", None) or ""
    given = {name: value for name, value in options.items() if value is not None}
    return RequestSpec(path, body | given, request_id)
