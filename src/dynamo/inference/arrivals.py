"""The arriving sequences of an engine: runs their sources, and lets them run when these end."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.worker_times import SequenceTimes
from dynamo.core.values import GenerateRequest
from dynamo.inference.kv_source import (
    Arrival,
    ArrivalCounters,
    FirstToken,
    KvSource,
    count_fallback,
)
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.sequence import EngineSequence

log = logging.getLogger(__name__)


class SequenceArrival(Arrival):
    """The arrival of one sequence of an engine."""

    def __init__(
        self, engine: EngineCore, counters: ArrivalCounters, sequence: EngineSequence
    ) -> None:
        request = sequence.request
        assert request is not None  # noqa: S101 - only requests name a source
        self.request: GenerateRequest = request
        self.context: Context = sequence.request_state.context
        self.prompt_tokens = sequence.prompt_tokens
        self.block_tokens = engine.scheduler.pool.block_tokens
        self.first_block = sequence.registered_blocks
        self.block_ids = [block.id for block in sequence.blocks[self.first_block :]]
        self._engine = engine
        self._counters = counters
        self._sequence = sequence
        self.blocks_arrived = 0
        counters.prompts += 1
        counters.blocks_saved += self.first_block

    @property
    def needs_blocks(self) -> bool:
        sequence = self._sequence
        return not sequence.ended and sequence.max_length > sequence.prompt_tokens + 1

    @property
    def compute_s(self) -> float:
        return self._missing_tokens * self._engine.timing_learner.token_s

    @property
    def _missing_tokens(self) -> int:
        return self._sequence.length - self._sequence.computed_tokens

    @property
    def missing_steps(self) -> int:
        return -(-self._missing_tokens // self._engine.scheduler.limits.max_num_batched_tokens)

    def fail(self, error: DynamoError) -> None:
        self._counters.fallbacks["sent again"] += 1
        if not self._sequence.ended:
            self._engine.end_sequence(self._sequence, error)

    def on_arrived(self, tokens: int) -> None:
        engine, sequence = self._engine, self._sequence
        first = self.first_block + self.blocks_arrived
        end = -(-tokens // self.block_tokens)
        self._counters.blocks_arrived += end - first
        self.blocks_arrived = end - self.first_block
        if sequence.ended:
            return
        engine.on_blocks_arrived(sequence, first, tokens)

    def on_first_token(self, first: FirstToken) -> bool:
        if not self._sequence.ended:
            self._engine.deliver_first_token(self._sequence, first)
        return not self._sequence.ended


class EngineArrivals:
    """Runs the sources of each arriving sequence of one engine in a task."""

    def __init__(self, engine: EngineCore) -> None:
        self.counters = ArrivalCounters()
        self._engine = engine
        self._background = BackgroundTasks()
        self._tasks: dict[EngineSequence, asyncio.Task[None]] = {}

    def update(self) -> None:
        """Start the sources of sequences that the scheduler has just admitted, and stop those of
        preempted ones."""
        arriving = self._engine.scheduler.arriving
        for sequence in arriving.preempted:
            self.stop(sequence)
        sequences, arriving.new = arriving.new, []
        for sequence in sequences:
            task = self._background.start(self._fill_from_all(sequence), "KV arrival")
            self._tasks[sequence] = task
            task.add_done_callback(partial(self._on_ended, sequence))

    def stop(self, sequence: EngineSequence) -> asyncio.Task[None] | None:
        """Stop the source of a sequence. Returns its task, which ends when nothing is written into
        the blocks any more. Another cancellation could end the task before that."""
        task = self._tasks.get(sequence)
        if task is not None and not task.cancelling():
            task.cancel()
        return task

    async def end(self, sequence: EngineSequence) -> None:
        """Stop the sources of a sequence that has ended. Its blocks are released on return."""
        task = self.stop(sequence)
        if task is not None:
            await asyncio.wait((task,))

    async def close(self) -> None:
        """Stop all sources."""
        await self._background.close()

    def _on_ended(self, sequence: EngineSequence, task: asyncio.Task[None]) -> None:
        del task
        del self._tasks[sequence]
        self._engine.on_arrival_ended(sequence)

    async def _fill_from_all(self, sequence: EngineSequence) -> None:
        for source in sequence.sources:
            counters = self.counters if source.counters is None else source.counters
            arrival = SequenceArrival(self._engine, counters, sequence)
            times = sequence.request_state.times
            await self._fill(source, arrival, counters, times)

    async def _fill(
        self,
        source: KvSource,
        arrival: SequenceArrival,
        counters: ArrivalCounters,
        times: SequenceTimes,
    ) -> None:
        now = asyncio.get_running_loop().time
        started_s = now()
        times.kv_began_s, times.kv_from = started_s, source.name
        try:
            await source.fill(arrival)
            if source.counters is None and arrival.request.kv_from and arrival.blocks_arrived:
                counters.moved += 1
        except Exception as error:
            if not isinstance(error, DynamoError):
                log.exception("a KV source failed")
            request = arrival.request
            worker = request.kv_from or request.prefill
            count_fallback(counters, error, request.request_id, worker)
        finally:
            counters.wait_s += now() - started_s
            times.on_kv_ended(now())
