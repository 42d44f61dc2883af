"""The calls of the API as values: path and body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_client.session import Ask

Message = Mapping[str, Any]
Prompt = str | Sequence[str] | Sequence[int]

MODELS = Ask("/v1/models")
HEALTH = Ask("/health")


def chat(messages: Sequence[Message], model: str, stream: bool, options: dict[str, Any]) -> Ask:
    """/v1/chat/completions."""
    body = {"model": model, "messages": messages, "stream": stream}
    return _ask("/v1/chat/completions", body, options)


def completion(prompt: Prompt, model: str, stream: bool, options: dict[str, Any]) -> Ask:
    """/v1/completions."""
    return _ask("/v1/completions", {"model": model, "prompt": prompt, "stream": stream}, options)


def tokenize(text: str | Sequence[Message], model: str) -> Ask:
    """/tokenize, of a text or of messages."""
    key = "prompt" if isinstance(text, str) else "messages"
    return _ask("/tokenize", {"model": model, key: text}, {})


def detokenize(tokens: Sequence[int], model: str) -> Ask:
    """/detokenize."""
    return _ask("/detokenize", {"model": model, "tokens": tokens}, {})


def _ask(path: str, body: dict[str, Any], options: dict[str, Any]) -> Ask:
    request_id = options.pop("request_id", None) or ""
    given = {name: value for name, value in options.items() if value is not None}
    return Ask(path, body | given, request_id)
