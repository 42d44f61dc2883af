"""The generation of one response."""

from __future__ import annotations

import logging

import msgspec

from dynamo.application.exchange import EventOutput, Exchange
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.generation.token_timing import TokenTiming
from dynamo.application.http_errors import OPENAI_ERRORS, ErrorFormat
from dynamo.application.openai.chat import ChatParts
from dynamo.application.openai.usage import UsageCounter
from dynamo.application.responses.input_items import Item
from dynamo.application.responses.store import ResponseStore
from dynamo.application.responses.writer import HeldReply, HeldStreamReply, ResponseItemWriter
from dynamo.core.errors import DynamoError, StoreUnavailable

log = logging.getLogger(__name__)


class ResponseErrors(ErrorFormat):
    """Ends a stream that fails with the failed response of `writer`."""

    def __init__(self, writer: ResponseItemWriter) -> None:
        self._writer = writer

    def encode(self, error: DynamoError, request_id: str) -> bytes:
        return OPENAI_ERRORS.encode(error, request_id)

    def encode_event(self, error: DynamoError, request_id: str) -> bytes:
        del request_id
        self._writer.fail(error)
        return self._writer.encode_last_event()


class Turn(msgspec.Struct):
    """A response that is generated for an `owner` of `items`, its own input. `output`: where its
    events go instead of to the client."""

    owner: str
    items: list[Item]
    chat: ChatParts
    writer: ResponseItemWriter
    reply: HeldReply | None = None
    output: EventOutput | None = None

    def check(self, generation: GenerationHandler, exchange: Exchange) -> None:
        """Raise what `generate` would raise for the fields of the request."""
        with self.chat.names:
            generation.read_chat_request(exchange, self.chat)

    async def count_tokens(self, generation: GenerationHandler, exchange: Exchange) -> int:
        """Return the tokens of the prompt. Raises as `generate`."""
        with self.chat.names:
            return await generation.count_tokens(exchange, self.chat)

    async def generate(self, generation: GenerationHandler, exchange: Exchange) -> bool:
        """Generate the response. Returns False if the client left before the end. Raises the errors
        of `GenerationHandler.answer_chat`, with the names of the fields of a response."""
        with self.chat.names:
            await generation.answer_chat(exchange, self.chat, self._make_reply)
        return self.writer.end is not None

    def _make_reply(
        self, exchange: Exchange, _model: str, usage_counter: UsageCounter, timing: TokenTiming
    ) -> HeldReply:
        make = HeldStreamReply if exchange.streaming else HeldReply
        self.reply = make(exchange, self.writer, usage_counter, timing, self.output)
        self.writer.items = self.reply.items
        return self.reply

    async def answer(
        self, generation: GenerationHandler, exchange: Exchange, store: ResponseStore
    ) -> None:
        """Generate the response, store it unless the client wants that not, then send its end. A
        stream that has begun is stored if it fails, too."""
        exchange.use_error_format(ResponseErrors(self.writer))
        try:
            if not await self.generate(generation, exchange) or self.reply is None:
                return
        except DynamoError as error:
            if exchange.response.started:
                self.writer.fail(error)
                await self._store(store)
            raise
        await self._store(store)
        self.reply.release()

    async def _store(self, store: ResponseStore) -> None:
        response = self.writer.response
        if not response["store"]:
            return
        try:
            await store.add(self.owner, response, self.items)
        except StoreUnavailable as error:
            log.warning("response not stored", extra={"fields": {"error": error.message}})
            response["store"] = False
