"""Writes one response as the events of a stream or as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.application.generation.items import AnswerItem, ItemReply, ItemStreamReply, ItemWriter
from dynamo.application.openai.usage import UsageCounter
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
from dynamo.core.text import DecodedTokenLogprob, TextFinish

encode_json = msgspec.json.encode
_DELTA_EVENTS = {
    "reasoning": b"response.reasoning_text.delta",
    "text": b"response.output_text.delta",
    "call": b"response.function_call_arguments.delta",
}


class ResponseItemWriter(ItemWriter):
    """Writes one response. `response` is its object, `items` are those of the answer so far, `end`
    is how the answer ended, if it has. `wall` returns Unix time."""

    def __init__(self, response: Item, wall: Callable[[], float]) -> None:
        self.response = response
        self.items: Sequence[AnswerItem] = ()
        self.end: TextFinish | None = None
        self._key = response["id"].removeprefix("resp_")
        self._wall = wall
        self._sequence = 0
        self._delta_parts = (b"", b"")

    def encode_start(self, usage: UsageCounter) -> bytes:
        del usage
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def encode_item_begun(self, item: AnswerItem) -> bytes:
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

    def encode_delta(
        self, item: AnswerItem, delta: str, logprobs: Sequence[DecodedTokenLogprob]
    ) -> bytes:
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

    def complete(self, end: TextFinish, usage: UsageCounter) -> None:
        """Complete `response` with the items of the answer."""
        response = self.response | {"output": self._output()}
        self.response = complete_response(response, end, usage, int(self._wall()))

    def fail(self, error: DynamoError) -> None:
        """Make `response` a failed one, with the items so far."""
        self.response = failed_response(self.response, error) | {"output": self._output()}

    def cancel(self) -> None:
        """Make `response` a cancelled one, with the items so far."""
        self.response |= {"status": "cancelled", "output": self._output()}

    def _output(self) -> list[Item]:
        return [output_item(item, self._key, self._status(item)) for item in self.items]

    def _status(self, item: AnswerItem) -> str:
        """Return the status of an item that has ended: at the end of an answer that was cut, its
        last text is incomplete."""
        cut = (
            self.end is not None
            and self.end.reason in INCOMPLETE_REASONS
            and item.kind != "call"
            and item is self.items[-1]
        )
        return "completed" if item.complete and not cut else "incomplete"

    def encode_end(
        self, items: Sequence[AnswerItem], end: TextFinish, usage: UsageCounter
    ) -> bytes:
        del items, end, usage
        return self.encode_last_event()

    def encode_last_event(self) -> bytes:
        """Return the last event of a stream: `response` has ended."""
        return self._event(f"response.{self.response['status']}", response=self.response)

    def encode_answer(
        self, items: Sequence[AnswerItem], end: TextFinish, usage: UsageCounter
    ) -> bytes:
        del items, end, usage
        return encode_json(self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(data))


class HeldReply(ItemReply):
    """Holds a complete answer back until `release`, so that it can be stored before. The writer
    must be a `ResponseItemWriter`."""

    __slots__ = ()
    _writer: ResponseItemWriter

    def finish(self, choice: int, end: TextFinish) -> None:
        self._writer.end = end
        super().finish(choice, end)

    def _send_end(self, end: TextFinish) -> None:
        self._writer.complete(end, self._usage_counter)

    def release(self) -> None:
        """Send the end of the answer, if it has ended."""
        if self._writer.end is not None:
            super()._send_end(self._writer.end)


class HeldStreamReply(HeldReply, ItemStreamReply):
    """Holds the last event of a stream back until `release`."""

    __slots__ = ()
