"""The JSON of chat and completion answers, in events or whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.application.usage import Tally
from dynamo.core.text import TextFinish, TokenText

_encode = msgspec.json.encode
_UNENDED = b',"logprobs":null,"finish_reason":null}]'


class Kind(msgspec.Struct, frozen=True):
    """What tells the answers of one route from those of others.

    `event`, `whole`: the `object` of an event, and of a whole answer. `before`, `after`: JSON
    around a text in an event; `opening` stands for both and the text in the event before the first
    (b"": there is none), `nothing` in the last. `said`: the field of a whole answer with the text.
    `logprobs(tokens)`: theirs.
    """

    prefix: str
    event: str
    whole: str
    before: bytes
    after: bytes
    opening: bytes
    nothing: bytes
    said: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Sequence[TokenText]], Any]


class Format:
    """The JSON of one request's answer. Prepared once; a token costs the joining of three pieces:
    `prefix`, its text as a JSON string, `suffix`. `usage`: events name it, as null but in the
    last."""

    __slots__ = ("_base", "_created", "_id", "_kind", "_model", "_tail", "suffix")

    def __init__(
        self, kind: Kind, request_id: str, model: str, created: int, *, usage: bool
    ) -> None:
        answer_id = kind.prefix + request_id
        self._kind = kind
        self._id, self._created, self._model = answer_id, created, model
        self._base = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _encode(answer_id),
            _encode(kind.event),
            created,
            _encode(model),
        )
        self._tail = b',"usage":null}\n\n' if usage else b"}\n\n"
        self.suffix = kind.after + _UNENDED + self._tail

    def prefix(self, choice: int) -> bytes:
        """What stands before the JSON string of a text."""
        return self._base + b'{"index":%d,%b' % (choice, self._kind.before)

    def opening(self, choice: int) -> bytes:
        """The event before the first text; b"" where there is none."""
        opening = self._kind.opening
        return self._base + b'{"index":%d,%b%b' % (choice, opening, self.suffix) if opening else b""

    def event(self, choice: int, text: str, logprobs: Sequence[TokenText]) -> bytes:
        """One text with its tokens' logprobs."""
        kind = self._kind
        form = b'{"index":%d,%b%b%b,"logprobs":%b,"finish_reason":null}]%b'
        told = _encode(kind.logprobs(logprobs))
        said = _encode(text)
        return self._base + form % (choice, kind.before, said, kind.after, told, self._tail)

    def finish(self, choice: int, end: TextFinish) -> bytes:
        """The last event of a choice."""
        form = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b'
        reason, stop = _encode(end.reason), _encode(end.stop)
        return self._base + form % (choice, self._kind.nothing, reason, stop, self._tail)

    def usage(self, tally: Tally) -> bytes:
        """The event that carries nothing but usage."""
        return self._base + b'],"usage":%b}\n\n' % _encode(tally.usage())

    def whole(
        self,
        texts: Sequence[str],
        logprobs: Sequence[Sequence[TokenText] | None],
        ends: Sequence[TextFinish],
        tally: Tally,
    ) -> bytes:
        """The unary answer."""
        kind = self._kind
        choices = [
            {
                "index": index,
                **kind.said(text),
                "logprobs": None if tokens is None else kind.logprobs(tokens),
                "finish_reason": end.reason,
                "stop_reason": end.stop,
            }
            for index, (text, tokens, end) in enumerate(zip(texts, logprobs, ends, strict=True))
        ]
        answer = {
            "id": self._id,
            "object": kind.whole,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": tally.usage(),
        }
        return _encode(answer)
