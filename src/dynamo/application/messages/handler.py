"""The routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.http_errors import RETRY_HINT, ErrorFormat, status_of
from dynamo.application.messages.body import (
    MessagesBody,
    TokenCountBody,
    answer_parts,
    prompt_parts,
)
from dynamo.application.messages.writer import MessageWriter
from dynamo.application.openai.body import decode_body
from dynamo.core.errors import ContextLengthExceeded, DynamoError

OVERLOADED_STATUS = 529
TOO_LONG = "prompt is too long"
"""The words of Anthropic, by which clients know that they must shorten the conversation."""
THREADS_UNSUPPORTED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""The details by which the tool runner of Anthropic's client continues without a thread."""
ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


class AnthropicErrorFormat(ErrorFormat):
    """Writes `{"type": "error", "error": {...}}`. A service that is away is overloaded: 529."""

    request_id_headers = ("request-id",)

    def status_of(self, error: DynamoError) -> int:
        status = status_of(error)
        return OVERLOADED_STATUS if status == 503 else status

    def encode(self, error: DynamoError, request_id: str) -> bytes:
        kind = ERROR_TYPE_BY_STATUS.get(self.status_of(error), "invalid_request_error")
        hint = error.hint or (RETRY_HINT if error.retryable else "")
        message = f"{error.message} ({hint})" if hint else error.message
        if isinstance(error, ContextLengthExceeded):
            message = f"{TOO_LONG}: {message}"
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
        if error.param == "thread":
            body["error"]["details"] = THREADS_UNSUPPORTED
        return msgspec.json.encode(body | {"request_id": request_id})

    def encode_event(self, error: DynamoError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.encode(error, request_id)


ANTHROPIC_ERRORS = AnthropicErrorFormat()


_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(TokenCountBody)


class MessagesHandler:
    """Answers chats in Anthropic's format, with the limits and deadlines of all chats."""

    def __init__(self, generation: GenerationHandler) -> None:
        self._generation = generation

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/messages."""
        body = decode_body(_decoder, exchange.request)
        if exchange.request.is_large:
            await exchange.request.pause()
        chat = answer_parts(body)
        if exchange.request.is_large:
            await exchange.request.pause()
        with chat.names:
            request, served = self._generation.read_chat_request(exchange, chat)
            name = f"msg_{exchange.request_id}"
            writer = MessageWriter(name, request.model, body.stop_sequences or ())
            await self._generation.answer_chat(exchange, request, served, writer)

    async def count_tokens(self, exchange: Exchange) -> None:
        """POST /v1/messages/count_tokens."""
        body = decode_body(_count_decoder, exchange.request)
        chat = prompt_parts(body)
        if exchange.request.is_large:
            await exchange.request.pause()
        with chat.names:
            tokens = await self._generation.count_tokens(exchange, chat)
        exchange.send_value({"input_tokens": tokens})
