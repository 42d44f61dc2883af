"""The JSON of chat and completion answers, in events or whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.application.openai.usage import UsageCounter
from dynamo.core.text import DecodedTokenLogprob, TextFinish

MAX_TOKEN_TABLES = 16
DONE_EVENT = b"data: [DONE]\n\n"
SSE_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


class JsonStringCache(dict[str, bytes]):
    """delta -> JSON string, remembered: tokens repeat. `escapes[delta]` is one C look-up."""

    def __init__(self, capacity: int = 1 << 16, max_text_length: int = 64) -> None:
        super().__init__()
        self._capacity = capacity
        self._token_tables: dict[int, tuple[list[str | None], list[bytes | None]]] = {}
        self._max_text_length = max_text_length

    def __missing__(self, delta: str) -> bytes:
        escaped = msgspec.json.encode(delta)
        if len(delta) <= self._max_text_length:
            if len(self) >= self._capacity:
                self.clear()
            self[delta] = escaped
        return escaped

    def token_table(self, texts: list[str | None]) -> list[bytes | None]:
        """As long as `texts`: the JSON strings of those that were said, for a look-up by token. One
        for each such list, of a few."""
        known = self._token_tables.get(id(texts))
        if known is None:
            if len(self._token_tables) >= MAX_TOKEN_TABLES:
                self._token_tables.clear()
            known = self._token_tables[id(texts)] = texts, [None] * len(texts)
        return known[1]


def error_event(error: bytes) -> bytes:
    """An error in the middle of a stream, and its end."""
    return b"data: %b\n\n%b" % (error, DONE_EVENT)


_encode = msgspec.json.encode
_UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


class ResponseTemplate(msgspec.Struct, frozen=True):
    """What tells the answers of one route from those of others.

    `event`, `whole`: the `object` of an event, and of a whole answer. `before`, `after`: JSON
    around a text in an event; `opening` stands for both and the text in the event before the first
    (b"": there is none), `nothing` in the last. `said`: the field of a whole answer with the text.
    `logprobs(tokens)`: theirs.
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


class ResponseEncoder:
    """The JSON of one request's answer. Prepared once; a token costs the joining of three pieces:
    `prefix`, its text as a JSON string, `suffix`. `usage`: events name it, as null but in the
    last."""

    __slots__ = (
        "_chunk_end",
        "_chunk_start",
        "_created",
        "_model",
        "_response_id",
        "_template",
        "text_suffix",
    )

    def __init__(
        self,
        kind: ResponseTemplate,
        request_id: str,
        model: str,
        created: int,
        *,
        include_usage: bool,
    ) -> None:
        answer_id = kind.id_prefix + request_id
        self._template = kind
        self._response_id, self._created, self._model = answer_id, created, model
        self._chunk_start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _encode(answer_id),
            _encode(kind.chunk_object),
            created,
            _encode(model),
        )
        self._chunk_end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self.text_suffix = kind.after_text + _UNFINISHED + self._chunk_end

    def text_prefix(self, choice: int) -> bytes:
        """What stands before the JSON string of a text."""
        return self._chunk_start + b'{"index":%d,%b' % (choice, self._template.before_text)

    def encode_first_chunk(self, choice: int) -> bytes:
        """The event before the first text; b"" where there is none."""
        opening = self._template.first_delta
        return (
            self._chunk_start + b'{"index":%d,%b%b' % (choice, opening, self.text_suffix)
            if opening
            else b""
        )

    def encode_text_chunk(
        self, choice: int, text: str, logprobs: Sequence[DecodedTokenLogprob]
    ) -> bytes:
        """One text with its tokens' logprobs."""
        kind = self._template
        form = b'{"index":%d,%b%b%b,"logprobs":%b,"finish_reason":null}]%b'
        told = _encode(kind.make_logprobs(logprobs))
        said = _encode(text)
        return self._chunk_start + form % (
            choice,
            kind.before_text,
            said,
            kind.after_text,
            told,
            self._chunk_end,
        )

    def encode_finish_chunk(self, choice: int, end: TextFinish) -> bytes:
        """The last event of a choice."""
        form = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b'
        reason, stop = _encode(end.reason), _encode(end.stop)
        return self._chunk_start + form % (
            choice,
            self._template.empty_delta,
            reason,
            stop,
            self._chunk_end,
        )

    def encode_usage_chunk(self, tally: UsageCounter) -> bytes:
        """The event that carries nothing but usage."""
        return self._chunk_start + b'],"usage":%b}\n\n' % _encode(tally.to_dict())

    def encode_response(
        self,
        texts: Sequence[str],
        logprobs: Sequence[Sequence[DecodedTokenLogprob] | None],
        ends: Sequence[TextFinish],
        tally: UsageCounter,
    ) -> bytes:
        """The unary answer."""
        kind = self._template
        choices = [
            {
                "index": index,
                **kind.make_text_field(text),
                "logprobs": None if tokens is None else kind.make_logprobs(tokens),
                "finish_reason": end.reason,
                "stop_reason": end.stop,
            }
            for index, (text, tokens, end) in enumerate(zip(texts, logprobs, ends, strict=True))
        ]
        answer = {
            "id": self._response_id,
            "object": kind.response_object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": tally.to_dict(),
        }
        return _encode(answer)
