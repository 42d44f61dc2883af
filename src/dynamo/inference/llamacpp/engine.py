"""The engine over llama.cpp's server. Requests run in its slots, one thread each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, WorkerFailed
from dynamo.core.reply import Engine, Reply
from dynamo.core.values import EngineInfo, EngineTotals, GenerateRequest, Load
from dynamo.inference.engines.answer import check_prompt
from dynamo.inference.llamacpp.answer import SlotAnswer
from dynamo.inference.llamacpp.request import FEATURES, make_body
from dynamo.inference.llamacpp.server import ServerSizes, default_sampling, open_server, plan_sizes
from dynamo.inference.llamacpp.slots import Slot, Slots

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo.inference.engine_registry import EngineInputs

log = logging.getLogger(__name__)

Complete = Callable[[dict[str, Any], Callable[[dict[str, Any]], bool]], None]


class LlamaCppEngine(Engine):
    """Serves one GGUF file. `sizes` are those of the server; a slot has `sizes.context_tokens`.
    `generation`: the model's own defaults of sampling."""

    def __init__(
        self,
        path: Path,
        sizes: ServerSizes,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        block_tokens: int = 16,
        prefix_caching: bool = True,
        generation: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._block_tokens = block_tokens
        self._prefix_caching = prefix_caching
        self._generation = generation
        self._slots = Slots(sizes.slots)
        self._free_slots = asyncio.Semaphore(sizes.slots)
        self._threads = ThreadPoolExecutor(sizes.slots, thread_name_prefix="llamacpp")
        self._answers: set[SlotAnswer] = set()
        self._complete: Complete | None = None
        self._server: Any = None
        self._waiting = 0
        self._totals = EngineTotals()

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._server = await loop.run_in_executor(
            self._threads, open_server, self._path, self._sizes
        )
        self._complete = self._server.handle_completions
        sizes = self._sizes
        return EngineInfo(
            engine="llamacpp",
            block_tokens=self._block_tokens,
            num_blocks=sizes.slots * sizes.context_tokens // self._block_tokens,
            context_tokens=sizes.context_tokens,
            max_num_seqs=sizes.slots,
            max_num_batched_tokens=sizes.batch_tokens,
            vocab_size=self._vocab_size,
            prefix_caching=self._prefix_caching,
            kv_events=False,
            features=FEATURES,
            sampling=default_sampling(self._generation, sizes.arguments),
        )

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        prompt = self._check_prompt(request)
        body = make_body(request, prompt, self._sizes.context_tokens)
        self._waiting += 1
        try:
            await self._free_slots.acquire()
        finally:
            self._waiting -= 1
        complete = self._complete
        if complete is None:
            self._free_slots.release()
            raise WorkerFailed("the engine was stopped")
        loop = asyncio.get_running_loop()
        slot, reusable = self._slots.reserve(prompt, request.salt)
        body |= {"id_slot": slot.number, "cache_prompt": self._prefix_caching and reusable > 0}
        answer = SlotAnswer(prompt, slot, request, reply, self._eos_token_ids, self._totals)
        self._answers.add(answer)
        call = loop.run_in_executor(self._threads, complete, body, answer.on_chunk)
        call.add_done_callback(lambda ended: self._on_call_ended(ended, slot, answer))
        try:
            if context.attempt:
                answer.begin()
            await answer.done
        finally:
            answer.stopped = True
            self._answers.discard(answer)
        await asyncio.wait([call])

    def report_load(self) -> Load:
        block_tokens = self._block_tokens
        return Load(
            running=len(self._answers),
            waiting=self._waiting,
            prefill_tokens=sum(answer.prefill_tokens for answer in self._answers),
            active_blocks=self._slots.count_blocks(block_tokens, busy=True),
            total_blocks=self._sizes.slots * self._sizes.context_tokens // block_tokens,
            steps=self._totals.steps,
            cached_blocks=self._slots.count_blocks(block_tokens),
        )

    async def clear_blocks(self) -> int:
        return self._slots.clear(self._block_tokens)

    def totals(self) -> EngineTotals:
        return self._totals

    async def stop(self) -> None:
        self._complete = None
        for answer in tuple(self._answers):
            answer.fail(WorkerFailed("the engine was stopped"))
        for _ in range(self._waiting):
            self._free_slots.release()
        await asyncio.to_thread(self._threads.shutdown)  # until no thread is in the server
        self._server = None

    def _check_prompt(self, request: GenerateRequest) -> tuple[int, ...]:
        if self._complete is None:
            raise WorkerFailed("the engine was stopped")
        prompt = unpack_ids(request.token_ids)
        check_prompt(prompt, self._sizes.context_tokens, self._vocab_size)
        return prompt

    def _on_call_ended(self, call: asyncio.Future[None], slot: Slot, answer: SlotAnswer) -> None:
        """Free the slot: its thread has returned."""
        slot.busy = False
        self._free_slots.release()
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, DynamoError):
            log.error("llama.cpp failed in a request", exc_info=error)
        reason = f": {error}" if error else " without an end of the answer"
        answer.fail(WorkerFailed(f"llama.cpp ended a request{reason}"))


async def open_engine(inputs: EngineInputs) -> LlamaCppEngine:
    """Create the engine. The model's weights are read when it starts. Raises
    `ConfigError`, and `ModelUnavailable` for a model that is no GGUF file."""
    card = inputs.card
    settings = inputs.settings.engine
    return LlamaCppEngine(
        inputs.files.path,
        plan_sizes(inputs),
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        block_tokens=settings.block_size,
        prefix_caching=settings.prefix_caching,
        generation=card.generation,
    )
