"""The requests of the API as values: path and JSON body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Prompt = str | Sequence[str] | Sequence[int]
JsonObject = dict[str, Any]


class RequestSpec(NamedTuple):
    """A request. `body` is encoded as JSON and sent by POST; None makes the request a GET."""

    path: str
    body: Any = None
    request_id: str = ""


LIST_MODELS = RequestSpec("/v1/models")
HEALTH_CHECK = RequestSpec("/health")


def chat(messages: Sequence[Message], model: str, stream: bool, options: JsonObject) -> RequestSpec:
    """A request to /v1/chat/completions. `options` are further fields of the body."""
    body = {"model": model, "messages": messages, "stream": stream}
    return _request_with_options("/v1/chat/completions", body, options)


def completion(prompt: Prompt, model: str, stream: bool, options: JsonObject) -> RequestSpec:
    """A request to /v1/completions. `options` are further fields of the body."""
    body = {"model": model, "prompt": prompt, "stream": stream}
    return _request_with_options("/v1/completions", body, options)


def tokenize(text: str | Sequence[Message], model: str) -> RequestSpec:
    """A request to /tokenize for a text or for messages."""
    key = "prompt" if isinstance(text, str) else "messages"
    return RequestSpec("/tokenize", {"model": model, key: text})


def detokenize(tokens: Sequence[int], model: str) -> RequestSpec:
    """A request to /detokenize."""
    return RequestSpec("/detokenize", {"model": model, "tokens": tokens})


def _request_with_options(path: str, body: JsonObject, options: JsonObject) -> RequestSpec:
    """Merge the options that are not None into `body`; `request_id` becomes a header."""
    request_id = options.pop("request_id", None) or ""
    present = {name: value for name, value in options.items() if value is not None}
    return RequestSpec(path, body | present, request_id)
