"""What the JSON of chat and completion answers has in common, in chunks or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.application.usage import Tally
from dynamo.core.text import TextFinish

_encode = msgspec.json.encode


class Envelope:
    """One request's. `base` and `tail` stand around the choices of every event; `usage`: events
    name it, as null but in the last."""

    __slots__ = ("_about", "_whole", "base", "tail")

    def __init__(
        self, answer_id: str, kinds: tuple[str, str], created: int, model: str, *, usage: bool
    ) -> None:
        """`kinds`: the `object` of an event, and that of a whole answer."""
        event, self._whole = kinds
        self._about = {"id": answer_id, "created": created, "model": model}
        self.base = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _encode(answer_id),
            _encode(event),
            created,
            _encode(model),
        )
        self.tail = b',"usage":null}\n\n' if usage else b"}\n\n"

    def choice(self, index: int, said: bytes, logprobs: Any = None) -> bytes:
        """An event; `said`: the field with the text and its JSON."""
        return self.base + b'{"index":%d,%b,"logprobs":%b,"finish_reason":null}]%b' % (
            index,
            said,
            _encode(logprobs),
            self.tail,
        )

    def finish(self, index: int, said: bytes, end: TextFinish) -> bytes:
        """The last event of a choice."""
        form = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b'
        reason, stop = _encode(end.reason), _encode(end.stop)
        return self.base + form % (index, said, reason, stop, self.tail)

    def usage(self, tally: Tally) -> bytes:
        """The event that carries nothing but usage."""
        return self.base + b'],"usage":%b}\n\n' % _encode(tally.usage())

    def whole(
        self,
        said: Sequence[tuple[str, Any]],
        ends: Sequence[TextFinish],
        tally: Tally,
        logprobs: Sequence[Any],
    ) -> bytes:
        """The unary answer; `said`: each choice's field with the text."""
        choices = [
            {
                "index": index,
                name: text,
                "logprobs": tokens,
                "finish_reason": end.reason,
                "stop_reason": end.stop,
            }
            for index, ((name, text), tokens, end) in enumerate(
                zip(said, logprobs, ends, strict=True)
            )
        ]
        about = {"id": self._about["id"], "object": self._whole} | self._about
        return _encode(about | {"choices": choices, "usage": tally.usage()})
