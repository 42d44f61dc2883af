"""A completion of llama.cpp's own server by URL: the chunks of the engine in process, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dynamo.communication.http.event_stream import DONE, EventStream, ServerEvent
from dynamo.core.clock import Clock
from dynamo.core.errors import MalformedAnswer
from dynamo.core.reply import Reply
from dynamo.core.values import EngineTotals, GenerateRequest
from dynamo.inference.llamacpp.answer import ChunkAnswer
from dynamo.inference.llamacpp.request import make_body
from dynamo.inference.llamacpp.slots import Slot
from dynamo.inference.openai_server.foreign_values import decode_value, excerpt
from dynamo.inference.openai_server.server_errors import event_error, find_error
from dynamo.inference.openai_server.server_facts import ServerFacts
from dynamo.inference.openai_server.streamed_answer import MAX_SILENT_BYTES, expect_end


def llamacpp_body(
    request: GenerateRequest, prompt: Sequence[int], context_tokens: int, facts: ServerFacts
) -> dict[str, Any]:
    """Return the body of the request. A salted prompt reuses nothing, since the server's slots are
    those of all tenants."""
    body = make_body(request, tuple(prompt), context_tokens)
    return body | {"model": facts.model.id, "cache_prompt": not request.salt}


class LlamaCppAnswer(ChunkAnswer):
    """Delivers the events of one answer."""

    def __init__(
        self,
        prompt: Sequence[int],
        request: GenerateRequest,
        reply: Reply,
        totals: EngineTotals,
        clock: Clock,
    ) -> None:
        super().__init__(tuple(prompt), Slot(0), request, reply, frozenset(), totals)
        self._max_tokens = request.stops.max_tokens
        self._events = EventStream(clock)
        self._silent_bytes = 0
        self.time_limit: asyncio.Timeout | None = None
        """The limit of the exchange, which has none until the answer is complete."""

    def on_data(self, part: bytes) -> bool:
        """Deliver a part of the body. False: the reply has enough, or the answer has ended. Raises
        `MalformedAnswer`, and the error of an event as `event_error` returns it."""
        self._silent_bytes += len(part)
        delivered = self.tokens_delivered
        for event in self._events.feed(part):
            if not self._on_event(event):
                return False
        if self.tokens_delivered > delivered:
            self._silent_bytes = 0
        elif self._silent_bytes > MAX_SILENT_BYTES:
            raise MalformedAnswer(f"the server sent {MAX_SILENT_BYTES} bytes without a token")
        return True

    def end(self) -> None:
        """Take the end of the body. Raises `MalformedAnswer` before that of the answer."""
        for event in () if self.ended else self._events.end():
            self._on_event(event)
        if not self.ended:
            raise MalformedAnswer("the server ended an answer before it was complete")

    def end_if_complete(self) -> bool:
        """Return whether the answer is complete."""
        return self.ended

    def _on_event(self, event: ServerEvent) -> bool:
        """Deliver an event. False: the reply has enough."""
        kind, data = event
        if self.ended or not data or data == DONE:
            return True
        try:
            chunk = decode_value(data)
            error = find_error(chunk, kind)
            if error is None:
                has_more = self.handle(chunk)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            text = f"the server sent no completion: {excerpt(data)}"
            raise MalformedAnswer(text) from None
        if error is not None:
            raise event_error(error)
        if not has_more:
            expect_end(self.time_limit)
        elif self.tokens_delivered > self._max_tokens:
            raise MalformedAnswer(f"the server sent more than {self._max_tokens} tokens")
        choices = chunk.get("choices")
        return has_more or bool(choices and choices[0].get("finish_reason"))
