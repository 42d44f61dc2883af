"""Engines without a model, to test everything in front of an engine: `echo` repeats the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.reply import Engine, Reply
from dynamo.core.values import EngineInfo, Finish, FinishReason, GenerateRequest, Load, Started
from dynamo.inference.engines.answer import check_prompt

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

MAX_NUM_SEQS = 256


class EchoEngine(Engine):
    """Sends the prompt's tokens once, one in each turn of the event loop.

    Subclasses choose another answer (`choose_answer`) and the tokens of a step (`steps`).
    """

    name = "echo"

    def __init__(self, *, context_tokens: int, vocab_size: int = 0) -> None:
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._running = 0
        self._stopped = False

    async def start(self) -> EngineInfo:
        return EngineInfo(
            engine=self.name,
            block_tokens=16,
            num_blocks=0,
            context_tokens=self._context_tokens,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=self._context_tokens,
            vocab_size=self._vocab_size,
            features=(),
        )

    def choose_answer(self, prompt: Sequence[int]) -> tuple[Sequence[int], FinishReason]:
        """Return the ids that answer `prompt`, and the reason of the end behind them."""
        return prompt, "stop"

    def steps(self, answer: Sequence[int], request: GenerateRequest) -> Iterator[Sequence[int]]:
        """Split the ids into the steps in which they are sent."""
        del request
        for token in answer:
            yield (token,)

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        del context
        ids = unpack_ids(request.token_ids)
        check_prompt(ids, self._context_tokens, 0)
        self._running += 1
        try:
            await self._stream_answer(ids[: len(ids) - request.resumed], len(ids), request, reply)
        finally:
            self._running -= 1

    async def _stream_answer(
        self, prompt: Sequence[int], length: int, request: GenerateRequest, reply: Reply
    ) -> None:
        whole, reason = self.choose_answer(prompt)
        reply.begin(Started(prompt_tokens=length))
        room = min(request.stops.max_tokens, self._context_tokens - length)
        answer = whole[request.resumed : request.resumed + room]
        for ids in self.steps(answer, request):
            if self._stopped:
                raise WorkerFailed("the engine was stopped")
            if not reply.tokens(tuple(ids)):
                return
            await asyncio.sleep(0)
        complete = request.resumed + len(answer) >= len(whole)
        reply.finish(Finish(reason if complete else "length", len(answer)))

    def report_load(self) -> Load:
        return Load(running=self._running)

    async def stop(self) -> None:
        self._stopped = True


async def open_engine(inputs: EngineInputs) -> EchoEngine:
    """Create the engine from the model's card."""
    card = inputs.card
    return EchoEngine(context_tokens=card.context_tokens, vocab_size=card.vocab_size)
