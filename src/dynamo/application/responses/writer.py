"""Writes one response as the events of a stream or as one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from dynamo.application.items import (
    AnswerItem,
    ItemKind,
    ItemWriter,
    TokenLogprobs,
)
from dynamo.application.responses.input_items import Item
from dynamo.application.responses.response_object import (
    INCOMPLETE_REASONS,
    complete_response,
    content_part,
    failed_response,
    logprob_fields,
    output_item,
)
from dynamo.core.errors import DynamoError

encode_json = msgspec.json.encode
_DELTA_EVENTS = {
    "reasoning": b"response.reasoning_text.delta",
    "text": b"response.output_text.delta",
    "call": b"response.function_call_arguments.delta",
}


class ResponseItemWriter(ItemWriter):
    """Writes one response. `response` is its object. `wall` returns Unix time."""

    kept_kinds: ClassVar[frozenset[ItemKind]] = frozenset({"reasoning", "text", "call"})
    holds_end = True

    def __init__(self, response: Item, wall: Callable[[], float]) -> None:
        self.response = response
        self._key = response["id"].removeprefix("resp_")
        self._wall = wall
        self._sequence = 0
        self._delta_parts = (b"", b"")

    def encode_start(self) -> bytes:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def begin_item(self, item: AnswerItem) -> bytes:
        fields = output_item(item, self._key, "in_progress")
        events = self._event("response.output_item.added", output_index=item.index, item=fields)
        place: Item = {"item_id": fields["id"], "output_index": item.index}
        if item.kind != "call":
            place["content_index"] = 0
            events += self._event("response.content_part.added", **place, part=content_part(item))
        name = _DELTA_EVENTS[item.kind]
        head = b"event: %b\ndata: " % name + encode_json({"type": name.decode(), **place})[:-1]
        self._delta_parts = (head + b',"delta":', b',"sequence_number":')
        return events

    def encode_delta(self, item: AnswerItem, delta: str, logprobs: TokenLogprobs) -> bytes:
        before, after = self._delta_parts
        if item.kind == "text":
            fields = encode_json(logprob_fields(logprobs)) if logprobs else b"[]"
            after = b',"logprobs":%b' % fields + after
        end = b"%d}\n\n" % self._sequence
        self._sequence += 1
        return before + encode_json(delta) + after + end

    def encode_item_ended(self, item: AnswerItem) -> bytes:
        fields = output_item(item, self._key, self._status(item))
        place: Item = {"item_id": fields["id"], "output_index": item.index}
        events = b""
        if item.kind != "call":
            place["content_index"] = 0
            part = content_part(item)
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            kind = "reasoning_text" if item.kind == "reasoning" else "output_text"
            events = self._event(f"response.{kind}.done", **place, **done)
            events += self._event("response.content_part.done", **place, part=part)
        elif item.complete:
            call = {"name": item.name, "arguments": item.text}
            events = self._event("response.function_call_arguments.done", **place, **call)
        return events + self._event(
            "response.output_item.done", output_index=item.index, item=fields
        )

    def complete(self) -> None:
        """Complete `response` with the items of the answer."""
        [choice] = self.choices
        response = self.response | {"output": self._output()}
        now = int(self._wall())
        self.response = complete_response(response, choice.end, self.usage, now)

    def fail(self, error: DynamoError) -> None:
        """Make `response` a failed one, with the items so far."""
        self.response = failed_response(self.response, error) | {"output": self._output()}

    def cancel(self) -> None:
        """Make `response` a cancelled one, with the items so far."""
        self.response |= {"status": "cancelled", "output": self._output()}

    def _output(self) -> list[Item]:
        items = self.choices[0].items if self.choices else ()
        return [output_item(item, self._key, self._status(item)) for item in items]

    def _status(self, item: AnswerItem) -> str:
        """Return the status of an item. The last text of an answer that was cut is incomplete."""
        [choice] = self.choices
        cut = choice.end.reason in INCOMPLETE_REASONS
        cut = cut and item.kind != "call" and item is choice.items[-1]
        return "incomplete" if cut or item is choice.current or not item.complete else "completed"

    def encode_end(self) -> bytes:
        return self.encode_last_event()

    def encode_last_event(self) -> bytes:
        """Return the last event of a stream: `response` has ended."""
        return self._event(f"response.{self.response['status']}", response=self.response)

    def encode_answer(self) -> bytes:
        return encode_json(self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(data))
