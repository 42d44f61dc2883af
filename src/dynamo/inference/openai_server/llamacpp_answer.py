"""A completion of llama.cpp's own server by URL: the chunks of the engine in process, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.codec import unpack_ids
from dynamo.core.errors import MalformedAnswer
from dynamo.core.reply import Reply
from dynamo.core.values import EngineTotals, FinishReason, GenerateRequest
from dynamo.inference.llamacpp.answer import ChunkReader
from dynamo.inference.llamacpp.request import make_body
from dynamo.inference.llamacpp.slots import Slot
from dynamo.inference.openai_server.foreign_values import decode_value
from dynamo.inference.openai_server.server_errors import event_error, find_error
from dynamo.inference.openai_server.server_facts import ServerFacts
from dynamo.inference.openai_server.streamed_answer import StreamedAnswer, no_completion


def llamacpp_body(
    request: GenerateRequest, prompt: Sequence[int], context_tokens: int, facts: ServerFacts
) -> dict[str, Any]:
    """Return the body of the request. A salted prompt reuses nothing, since the server's slots are
    those of all tenants."""
    body = make_body(request, tuple(prompt), context_tokens)
    return body | {"model": facts.model.id, "cache_prompt": not request.salt}


class LlamaCppAnswer(StreamedAnswer):
    """Delivers the chunks of one answer."""

    def __init__(
        self, request: GenerateRequest, reply: Reply, totals: EngineTotals, clock: Clock
    ) -> None:
        super().__init__(request, reply, totals, clock)
        prompt = tuple(unpack_ids(request.token_ids))
        self._chunks = ChunkReader(self, prompt, Slot(0), frozenset())

    @staticmethod
    def _decode(data: bytes, kind: bytes) -> Any:
        chunk = decode_value(data)
        error = find_error(chunk, kind)
        if error is not None:
            raise event_error(error)
        return chunk

    def _deliver(self, chunk: Any) -> bool:
        try:
            has_more = self._chunks.handle(chunk)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            raise no_completion(msgspec.json.encode(chunk)) from None
        if has_more:
            if self.tokens > self._max_tokens:
                raise MalformedAnswer(f"the server sent more than {self._max_tokens} tokens")
            return True
        self._expect_end()
        choices = chunk.get("choices")
        return bool(choices and choices[0].get("finish_reason"))

    def _finish(self, reason: FinishReason) -> None:
        self._chunks.finish(reason)
