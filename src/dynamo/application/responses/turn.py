"""The generation of one response."""

from __future__ import annotations

import logging

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.generation.replies import HttpReply
from dynamo.application.http_errors import OpenAIErrorFormat
from dynamo.application.openai.chat import ChatParts
from dynamo.application.responses.input_items import Item
from dynamo.application.responses.store import ResponseStore
from dynamo.application.responses.writer import ResponseItemWriter
from dynamo.core.errors import DynamoError, StoreUnavailable

log = logging.getLogger(__name__)


class FailedResponse(OpenAIErrorFormat):
    """Ends a stream that fails with the failed response of `writer`."""

    def __init__(self, writer: ResponseItemWriter) -> None:
        self._writer = writer

    def encode_event(self, error: DynamoError, request_id: str) -> bytes:
        del request_id
        self._writer.fail(error)
        return self._writer.encode_last_event()


class Turn(msgspec.Struct):
    """A response that is generated for an `owner` of `items`, its own input."""

    owner: str
    items: list[Item]
    chat: ChatParts
    writer: ResponseItemWriter

    async def generate(self, generation: GenerationHandler, exchange: Exchange) -> HttpReply | None:
        """Generate the response. Returns the reply, which holds its end back; None if the client
        left before. Raises errors with the names of the fields of a response."""
        with self.chat.names:
            request, served = generation.read_chat_request(exchange, self.chat)
            reply = await generation.answer_chat(exchange, request, served, self.writer)
        if reply.remaining_choices:
            return None
        self.writer.complete()
        return reply

    async def answer(
        self, generation: GenerationHandler, exchange: Exchange, store: ResponseStore
    ) -> None:
        """Generate the response, store it unless the client wants that not, then send its end. A
        stream that has begun is stored if it fails, too."""
        exchange.use_error_format(FailedResponse(self.writer))
        with generation.hold_story(exchange):
            try:
                reply = await self.generate(generation, exchange)
            except DynamoError as error:
                if exchange.response.started:
                    self.writer.fail(error)
                    await self._store(store)
                raise
            if reply is not None:
                await self._store(store)
                reply.send_end()

    async def _store(self, store: ResponseStore) -> None:
        response = self.writer.response
        if not response["store"]:
            return
        try:
            await store.add(self.owner, response, self.items)
        except StoreUnavailable as error:
            log.warning("response not stored", extra={"fields": {"error": error.message}})
            response["store"] = False
