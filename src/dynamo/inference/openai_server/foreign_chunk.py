"""Events of other servers' answers: the fields that are read, of which each may hold anything."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.errors import DECODE_ERRORS
from dynamo.inference.openai_server.foreign_values import decode_value, read_object, read_objects
from dynamo.inference.openai_server.server_errors import event_error, find_error


class ForeignMessage(msgspec.Struct):
    """A part of a chat answer. Servers give reasoning one of three names."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None


class ForeignChoice(msgspec.Struct):
    """A part of a choice. An answer that is not streamed has a message instead of a delta."""

    delta: ForeignMessage | None = None
    message: ForeignMessage | None = None
    text: Any = None
    token_ids: Any = None
    finish_reason: Any = None
    stop_reason: Any = None
    logprobs: Any = None
    usage: Any = None
    error: Any = None


class ForeignChunk(msgspec.Struct):
    """An event of a streamed answer."""

    choices: list[ForeignChoice] | None = None
    usage: Any = None
    x_groq: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(ForeignChunk).decode


def decode_chunk(data: bytes, kind: bytes = b"") -> ForeignChunk:
    """Return the event with this data. `kind`: its name. Raises `ValueError` for what is no JSON,
    and the error that the event is or has."""
    try:
        chunk = _decode(data)
    except DECODE_ERRORS:
        chunk = ForeignChunk()
    if chunk.choices and not chunk.error and not kind and not chunk.choices[0].error:
        return chunk
    value = decode_value(data)
    error = find_error(value, kind)
    if error is not None:
        raise event_error(error)
    return chunk if chunk.choices else msgspec.convert(_repair(value), ForeignChunk)


def _repair(value: Any) -> dict[str, Any]:
    """Return an event without objects and lists where other things stand."""
    event = read_object(value)
    choices = [
        {
            **choice,
            "delta": next(iter(read_objects(choice.get("delta"))), None),
            "message": next(iter(read_objects(choice.get("message"))), None),
        }
        for choice in read_objects(event.get("choices"))
    ]
    return {**event, "choices": choices}
