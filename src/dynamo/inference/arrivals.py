"""The arriving sequences of an engine: runs their sources, and lets them run when these end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InternalError, TransferFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest
from dynamo.inference.kv_source import Arrival, FirstToken, KvSource
from dynamo.inference.sequence import EngineSequence

if TYPE_CHECKING:
    from dynamo.inference.step_scheduler import StepScheduler

log = logging.getLogger(__name__)


class ArrivalCounters(msgspec.Struct):
    """Totals of an engine's arrivals.

    `blocks_arrived` were filled by sources; `blocks_saved` were in the engine's own cache when an
    arrival began. `wait_s` is the sum of the arrivals' durations. `fallbacks` counts failed sources
    by reason.
    """

    prompts: int = 0
    wait_s: float = 0.0
    blocks_arrived: int = 0
    blocks_saved: int = 0
    fallbacks: Counter[str] = msgspec.field(default_factory=Counter)


class ArrivalHost(Protocol):
    """The engine of arriving sequences."""

    scheduler: StepScheduler

    def deliver_first_token(self, sequence: EngineSequence, first: FirstToken) -> None:
        """Add the first token to an arriving sequence and send it to the reply."""

    def on_blocks_arrived(self, sequence: EngineSequence, first: int, tokens: int) -> None:
        """Take over blocks from `first` up to position `tokens` of an arriving sequence."""

    def on_arrival_ended(self, sequence: EngineSequence) -> None:
        """Let the sequence run, or release its blocks if it has ended."""


class SequenceArrival(Arrival):
    """The arrival of one sequence of an engine."""

    def __init__(
        self, host: ArrivalHost, counters: ArrivalCounters, sequence: EngineSequence
    ) -> None:
        request = sequence.request
        assert request is not None  # noqa: S101 - only requests name a source
        self.request: GenerateRequest = request
        self.context: Context = sequence.request_state.context
        self.prompt_tokens = sequence.prompt_tokens
        self.block_tokens = host.scheduler.pool.block_tokens
        self.first_block = sequence.registered_blocks
        self.block_ids = [block.id for block in sequence.blocks[self.first_block :]]
        self._host = host
        self._counters = counters
        self._sequence = sequence
        self._blocks_arrived = 0
        counters.prompts += 1
        counters.blocks_saved += self.first_block

    @property
    def needs_blocks(self) -> bool:
        sequence = self._sequence
        return not sequence.ended and sequence.max_length > sequence.prompt_tokens + 1

    def on_arrived(self, tokens: int) -> None:
        host, sequence = self._host, self._sequence
        first = self.first_block + self._blocks_arrived
        end = -(-tokens // self.block_tokens)
        self._counters.blocks_arrived += end - first
        self._blocks_arrived = end - self.first_block
        if not sequence.ended:
            host.on_blocks_arrived(sequence, first, tokens)

    def on_first_token(self, first: FirstToken) -> bool:
        if not self._sequence.ended:
            self._host.deliver_first_token(self._sequence, first)
        return not self._sequence.ended


class EngineArrivals:
    """Runs the source of each arriving sequence of one engine in a task."""

    def __init__(self, host: ArrivalHost) -> None:
        self.counters = ArrivalCounters()
        self._host = host
        self._background = BackgroundTasks()
        self._tasks: dict[EngineSequence, asyncio.Task[None]] = {}

    def start_new(self) -> None:
        """Start the sources of the sequences that the scheduler has just admitted."""
        sequences, self._host.scheduler.new_arrivals = self._host.scheduler.new_arrivals, []
        for sequence in sequences:
            source = sequence.source
            assert source is not None  # noqa: S101 - the scheduler admits only sequences with one
            arrival = SequenceArrival(self._host, self.counters, sequence)
            task = self._background.start(self._fill(source, arrival), "KV arrival")
            self._tasks[sequence] = task
            task.add_done_callback(partial(self._on_ended, sequence))

    async def end(self, sequence: EngineSequence) -> None:
        """Stop the source of a sequence that has ended. Its blocks are released on return."""
        task = self._tasks.get(sequence)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def close(self) -> None:
        """Stop all sources."""
        await self._background.close()

    def _on_ended(self, sequence: EngineSequence, task: asyncio.Task[None]) -> None:
        del task
        del self._tasks[sequence]
        self._host.on_arrival_ended(sequence)

    async def _fill(self, source: KvSource, arrival: SequenceArrival) -> None:
        now = asyncio.get_running_loop().time
        started_s = now()
        try:
            await source.fill(arrival)
        except TransferFailed as error:
            self._on_failed(arrival, f"transfer {error.reason}", error)
        except DynamoError as error:
            self._on_failed(arrival, error.code, error)
        except Exception as error:
            log.exception("a KV source failed")
            self._on_failed(arrival, InternalError.code, error)
        finally:
            self.counters.wait_s += now() - started_s

    def _on_failed(self, arrival: SequenceArrival, reason: str, error: Exception) -> None:
        self.counters.fallbacks[reason] += 1
        fields = {
            "request": arrival.request.request_id,
            "prefill_worker": arrival.request.prefill,
            "reason": reason,
            "error": str(error),
        }
        log.warning("KV did not arrive: the rest is computed here", extra={"fields": fields})
