"""The JSON of chat and completion answers, as server-sent events or complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.application.openai.answer_parts import AnswerParts
from dynamo.application.openai.usage import UsageCounter
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    DecodedTokenLogprob,
    ReasoningDelta,
    RefusalDelta,
    TextFinish,
)

DONE_EVENT = b"data: [DONE]\n\n"
SSE_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields of answers with the model's reasoning; clients read one or the other."""


class JsonStringCache(dict[str, bytes]):
    """Caches the JSON string of each text, because tokens repeat. A lookup is one C call."""

    def __init__(self, capacity: int = 1 << 16, max_text_length: int = 64) -> None:
        super().__init__()
        self._capacity = capacity
        self._max_text_length = max_text_length

    def __missing__(self, text: str) -> bytes:
        json_text = msgspec.json.encode(text)
        if len(text) <= self._max_text_length:
            if len(self) >= self._capacity:
                self.clear()
            self[text] = json_text
        return json_text


_encode = msgspec.json.encode
_UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


def event_delta(event: AnswerEvent, reasoning_fields: Sequence[str]) -> dict[str, Any] | None:
    """Return OpenAI's delta of an event; None where nothing is written."""
    if isinstance(event, ReasoningDelta):
        return dict.fromkeys(reasoning_fields, event.text)
    if isinstance(event, RefusalDelta):
        return {"refusal": event.text}
    call: dict[str, Any]
    if isinstance(event, CallBegun):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
    elif isinstance(event, ArgumentsDelta):
        call = {"index": event.index, "function": {"arguments": event.text}}
    else:
        return None
    return {"tool_calls": [call]}


class ResponseTemplate(msgspec.Struct, frozen=True):
    """The JSON that differs between the answers of two routes.

    `chunk_object`, `response_object`: the field `object` of an event and of a complete answer.
    `before_text`, `after_text`: JSON around a text in an event. `first_delta`: the delta of the
    event before the first text (b"": there is no such event). `empty_delta`: that of the last one.
    `make_text_field(text)` and `make_logprobs(tokens)` return fields of a choice. The model's
    reasoning is written into each of `reasoning_fields`. Answers with tool calls finish with
    `call_reason`. `service_tier`: repeated unless "". `null_fields`: in a complete answer.
    """

    id_prefix: str
    chunk_object: str
    response_object: str
    before_text: bytes
    after_text: bytes
    first_delta: bytes
    empty_delta: bytes
    make_text_field: Callable[[str], dict[str, Any]]
    make_logprobs: Callable[[Sequence[DecodedTokenLogprob]], Any]
    reasoning_fields: Sequence[str] = REASONING_FIELDS
    call_reason: str = "tool_calls"
    service_tier: str = ""
    null_fields: Mapping[str, None] = {}


class ResponseEncoder:
    """Encodes the answer of one request.

    All constant parts are encoded once. The event of a text is `text_prefix(choice)`, its JSON
    string and `text_suffix`. With `include_usage`, all events but the last have a null `usage`.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        request_id: str,
        model: str,
        created: int,
        *,
        include_usage: bool,
    ) -> None:
        response_id = template.id_prefix + request_id
        self._template = template
        self._response_id, self._created, self._model = response_id, created, model
        tier = template.service_tier
        self._tier_field = {"service_tier": tier} if tier else {}
        self._chunk_start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,%b"choices":[' % (
            _encode(response_id),
            _encode(template.chunk_object),
            created,
            _encode(model),
            b'"service_tier":%b,' % _encode(tier) if tier else b"",
        )
        self._chunk_end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self.text_suffix = template.after_text + _UNFINISHED + self._chunk_end

    def show_usage(self, usage: Mapping[str, Any]) -> bytes:
        """Write `usage` into all further events. Returns the new `text_suffix`."""
        self._chunk_end = b',"usage":%b}\n\n' % _encode(usage)
        self.text_suffix = self._template.after_text + _UNFINISHED + self._chunk_end
        return self.text_suffix

    def text_prefix(self, choice: int) -> bytes:
        """Return the bytes before the JSON string of a text."""
        return self._chunk_start + b'{"index":%d,%b' % (choice, self._template.before_text)

    def encode_first_chunk(self, choice: int) -> bytes:
        """Return the event before the first text; b"" where the route has none."""
        delta = self._template.first_delta
        if not delta:
            return b""
        return self._chunk_start + b'{"index":%d,%b%b' % (choice, delta, self.text_suffix)

    def encode_text_chunk(
        self, choice: int, text: str, logprobs: Sequence[DecodedTokenLogprob]
    ) -> bytes:
        """Return the event of a text with the logprobs of its tokens."""
        template = self._template
        return self._chunk_start + b'{"index":%d,%b%b%b,"logprobs":%b,"finish_reason":null}]%b' % (
            choice,
            template.before_text,
            _encode(text),
            template.after_text,
            _encode(template.make_logprobs(logprobs)),
            self._chunk_end,
        )

    def encode_event_chunk(self, choice: int, event: AnswerEvent) -> bytes:
        """Return the event of reasoning or of a part of a call; b"" if nothing is written."""
        delta = event_delta(event, self._template.reasoning_fields)
        if delta is None:
            return b""
        chunk = b'{"index":%d,"delta":%b%b%b'
        return self._chunk_start + chunk % (choice, _encode(delta), _UNFINISHED, self._chunk_end)

    def encode_finish_chunk(self, choice: int, end: TextFinish) -> bytes:
        """Return the last event of a choice."""
        chunk = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b'
        delta, stop = self._template.empty_delta, _encode(end.stop)
        reason: str = end.reason
        if reason == "tool_calls":
            reason = self._finish_reason(end)
        return self._chunk_start + chunk % (choice, delta, _encode(reason), stop, self._chunk_end)

    def encode_usage_chunk(self, usage: UsageCounter) -> bytes:
        """Return the event that contains only the usage."""
        return self._chunk_start + b'],"usage":%b}\n\n' % _encode(usage.to_dict())

    def _finish_reason(self, end: TextFinish) -> str:
        return self._template.call_reason if end.reason == "tool_calls" else end.reason

    def _make_fields(self, text: str, parts: AnswerParts | None, end: TextFinish) -> dict[str, Any]:
        fields = self._template.make_text_field(text)
        if parts is not None:
            message = fields["message"]
            message |= parts.fields(self._template.reasoning_fields, end.reason)
            if "tool_calls" in message or "refusal" in message:
                message["content"] = text or None
        return fields

    def make_response(
        self,
        texts: Sequence[str],
        logprobs: Sequence[Sequence[DecodedTokenLogprob] | None],
        ends: Sequence[TextFinish],
        usage: UsageCounter,
        parts: Mapping[int, AnswerParts],
    ) -> dict[str, Any]:
        """Return the complete answer as a value. `parts`: reasoning and calls of the choices that
        have any."""
        template = self._template
        choices = [
            {
                "index": index,
                **self._make_fields(text, parts.get(index), end),
                "logprobs": None if tokens is None else template.make_logprobs(tokens),
                "finish_reason": self._finish_reason(end),
                "stop_reason": end.stop,
            }
            for index, (text, tokens, end) in enumerate(zip(texts, logprobs, ends, strict=True))
        ]
        return {
            "id": self._response_id,
            "object": template.response_object,
            "created": self._created,
            "model": self._model,
            **self._tier_field,
            "choices": choices,
            "usage": usage.to_dict(),
            **template.null_fields,
        }
