"""The routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.messages.body import (
    MessagesBody,
    TokenCountBody,
    answer_parts,
    prompt_parts,
)
from dynamo.application.messages.writer import MessageWriter
from dynamo.application.openai.body import decode_body

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
