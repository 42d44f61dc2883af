"""The engine of a program's handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, Finish, FinishReason, GenerateRequest, Load, Started
from dynamo.inference.handler.request import HandlerItem, handler_request
from dynamo.runtime.compatibility.calls import CompatContext, pass_on

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard

StartHandler = Callable[[Any, CompatContext], AsyncGenerator[Any, None]]
EncodeText = Callable[[str], bytes]
MAX_NUM_SEQS = 256


class HandlerAnswer:
    """The answer of one request: passes the handler's parts on until its end, a stop token or the
    limit of tokens. `over` is done when nothing more will be passed on. `call` is stopped if the
    handler has more to say, and killed if the caller has left."""

    def __init__(
        self,
        request: GenerateRequest,
        reply: Reply,
        call: CompatContext,
        encode_text: EncodeText,
        stops: frozenset[int],
    ) -> None:
        self._reply = reply
        self._call = call
        self._encode_text = encode_text
        self._stops = stops
        self._max_tokens = request.stops.max_tokens
        self._min_tokens = request.stops.min_tokens
        self._sent = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(self, item: Any) -> bool:
        """Pass a part on. Returns False if it was the last one. Raises `WorkerFailed`."""
        part = HandlerItem.parse(item)
        ids = part.token_ids
        if not ids and part.text:
            ids = list(unpack_ids(self._encode_text(part.text)))
        room = self._max_tokens - self._sent
        for position, token in enumerate(ids[:room]):
            if token in self._stops and self._sent + position >= self._min_tokens:
                self._send(part, ids[:position])
                if part.reason is None:
                    self._call.stop_generating()
                return self.end("stop", token)
        if not self._send(part, ids[:room]):
            self.close()
            return False
        if part.reason is not None:
            return self.end(part.reason)
        if self._sent < self._max_tokens:
            return True
        self._call.stop_generating()
        return self.end("length")

    def end(self, reason: FinishReason, stop_token: int | None = None) -> bool:
        """End the answer, unless it is over. Returns False."""
        if not self.over.done():
            tokens = self._sent + (stop_token is not None)
            self._reply.finish(Finish(reason, tokens, stop_token=stop_token))
        self._set_over()
        return False

    def close(self) -> None:
        """Pass nothing more on: the caller has left."""
        self._call.kill()
        self._set_over()

    def _set_over(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _send(self, part: HandlerItem, ids: list[int]) -> bool:
        self._sent += len(ids)
        return not ids or self._reply.tokens(ids, part.logprobs(ids))


class HandlerEngine(Engine):
    """Answers by a handler, an async generator function of request and context.

    A handler whose answer is over early sees that its context is stopped, and is closed at its
    second `yield` after that.
    """

    def __init__(
        self,
        start: StartHandler,
        card: ModelCard,
        encode_text: EncodeText,
        *,
        max_num_seqs: int = 0,
        num_blocks: int = 0,
    ) -> None:
        self._start = start
        self._card = card
        self._encode_text = encode_text
        self._max_num_seqs = max_num_seqs or MAX_NUM_SEQS
        self._num_blocks = num_blocks
        self._running = 0
        self._stopped = False
        self._tasks = BackgroundTasks(on_failure=lambda _: None)

    async def start(self) -> EngineInfo:
        card = self._card
        return EngineInfo(
            engine="handler",
            block_tokens=card.block_tokens,
            num_blocks=self._num_blocks,
            context_tokens=card.context_tokens,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=card.context_tokens,
            vocab_size=card.vocab_size,
            features=("logprobs", "structured"),
        )

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self._stopped:
            raise WorkerFailed("the engine was stopped")
        request_id = context.request_id + (f"-{request.choice}" if request.choice else "")
        call = CompatContext(request_id, context.metadata, trace=context.trace)
        eos = () if request.stops.ignore_eos else self._card.eos_token_ids
        stops = frozenset((*eos, *request.stops.stop_token_ids))
        reply.begin(Started(prompt_tokens=len(request.token_ids) // TOKEN_BYTES))
        answer = HandlerAnswer(request, reply, call, self._encode_text, stops)
        self._running += 1
        running = self._tasks.start(self._answer(request, call, answer))
        try:
            await asyncio.wait({running, answer.over}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            answer.close()
            raise
        finally:
            self._running -= 1
        if running.done():
            running.result()

    async def _answer(
        self, request: GenerateRequest, call: CompatContext, answer: HandlerAnswer
    ) -> None:
        async def send(item: Any) -> bool:
            return not answer.over.done() and answer.receive(item)

        body = handler_request(request, self._card.eos_token_ids)
        if await pass_on(self._start(body, call), send):
            answer.end("stop")

    async def prove_progress(self, canary: GenerateRequest, context: Context, reply: Reply) -> None:
        """Do nothing: a handler may count or record its requests."""
        del canary, context, reply

    def report_load(self) -> Load:
        return Load(running=self._running)

    async def stop(self) -> None:
        self._stopped = True
        await self._tasks.close()
