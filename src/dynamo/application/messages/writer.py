"""The JSON of Anthropic's messages, as server-sent events or whole."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, ClassVar

import msgspec

from dynamo.application.items import AnswerItem, ItemKind, ItemWriter, UsageCounter
from dynamo.application.messages.conversation import CALL_PREFIX
from dynamo.core.errors import DECODE_ERRORS

_encode = msgspec.json.encode
SIGNATURE_BYTES = 16


def encode_event(kind: str, **fields: Any) -> bytes:
    """Return one event; its data has the same type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


_DELTAS: dict[ItemKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a delta's event, and the field of its text."""


class MessageWriter(ItemWriter):
    """Writes one message. `stop_sequences` are the client's own."""

    kept_kinds: ClassVar[frozenset[ItemKind]] = frozenset({"reasoning"})

    def __init__(self, message_id: str, model: str, stop_sequences: Collection[str]) -> None:
        self._message_id = message_id
        self._model = model
        self._stop_sequences = stop_sequences

    def encode_start(self) -> bytes:
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        return encode_event("message_start", message=message)

    def begin_item(self, item: AnswerItem) -> bytes:
        kind, field = _DELTAS[item.kind]
        event = encode_event(
            "content_block_delta", index=item.index, delta={"type": kind, field: ""}
        )
        before, after = event.rsplit(b'""', 1)
        item.frame = before, after
        block = _block(item) | ({"signature": ""} if item.kind == "reasoning" else {})
        return encode_event("content_block_start", index=item.index, content_block=block)

    def encode_item_ended(self, item: AnswerItem) -> bytes:
        events = encode_event("content_block_stop", index=item.index)
        if item.kind != "reasoning":
            return events
        delta = {"type": "signature_delta", "signature": _sign(item.text)}
        return encode_event("content_block_delta", index=item.index, delta=delta) + events

    def encode_end(self) -> bytes:
        delta = self._stop_fields()
        events = encode_event("message_delta", delta=delta, usage=_usage_fields(self.usage))
        return events + encode_event("message_stop")

    def encode_answer(self) -> bytes:
        # an incomplete call in the middle is followed by its text
        items = self.choices[0].items
        blocks = [_block(item) for item in items if item.complete or item is items[-1]]
        return _encode(self._message(blocks, self._stop_fields()))

    def _message(self, blocks: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **stop,
            "usage": _usage_fields(self.usage),
        }

    def _stop_fields(self) -> dict[str, Any]:
        [choice] = self.choices
        end = choice.end
        sequence = end.stop if end.stop in self._stop_sequences else None
        if end.reason == "length":
            reason = "max_tokens"
        elif end.reason == "content_filter":
            reason = "refusal"
        elif any(item.kind == "call" and item.complete for item in choice.items):
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _block(item: AnswerItem) -> dict[str, Any]:
    text = item.text
    if item.kind == "text":
        return {"type": "text", "text": text}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _sign(text)}
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except DECODE_ERRORS:
        text = "{}"  # none yet, a cut call, or a server's arguments that are no object
    call = {"type": "tool_use", "id": CALL_PREFIX + item.call_id, "name": item.name}
    return call | {"input": msgspec.Raw(text.encode())}


def _sign(thinking: str) -> str:
    """Return a digest in the place of Anthropic's signature, which clients must send back."""
    return hashlib.blake2b(thinking.encode(), digest_size=SIGNATURE_BYTES).hexdigest()


def _usage_fields(usage: UsageCounter) -> dict[str, Any]:
    """Return Anthropic's usage. Its input tokens are those that were not cached."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
