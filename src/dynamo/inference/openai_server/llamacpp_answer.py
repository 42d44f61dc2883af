"""A completion of llama.cpp's own server by URL: the chunks of the engine in process, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.communication.http.client import EventStream
from dynamo.core.errors import WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.values import EngineTotals, GenerateRequest
from dynamo.inference.llamacpp.answer import ChunkAnswer
from dynamo.inference.llamacpp.request import make_body
from dynamo.inference.llamacpp.slots import Slot
from dynamo.inference.openai_server.server_facts import ServerFacts, excerpt

DONE = b"[DONE]"
_decode = msgspec.json.Decoder(dict[str, Any]).decode


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
        self, prompt: Sequence[int], request: GenerateRequest, reply: Reply, totals: EngineTotals
    ) -> None:
        super().__init__(tuple(prompt), Slot(0), request, reply, frozenset(), totals)
        self._events = EventStream()

    def on_data(self, part: bytes) -> bool:
        """Deliver a part of the body. False: the reply has enough, or the answer has ended."""
        for event in self._events.feed(part):
            if event == DONE:
                continue
            try:
                chunk = _decode(event)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise WorkerFailed(f"the server sent no completion: {excerpt(event)}") from None
            if self.ended or self.handle(chunk):
                continue
            choices = chunk.get("choices")
            if not choices or not choices[0].get("finish_reason"):
                return False
        return True
