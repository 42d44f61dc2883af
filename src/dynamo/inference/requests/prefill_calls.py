"""Prompts that an engine computes for other workers, and whose blocks it holds for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Finish, Started
from dynamo.inference.kv_source import FirstToken, PrefillSink
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.sequence import EngineSequence


class PrefillCall(Reply):
    """A prompt that is computed for another worker. As the reply of its sequence it receives the
    first token; the sequence then leaves the batch and keeps its blocks until the call ends."""

    __slots__ = ("_engine", "_region", "_reported_blocks", "_sink", "_times", "sequence")

    def __init__(
        self,
        engine: EngineCore,
        region: MemoryRegion,
        sink: PrefillSink,
        have_blocks: int,
        sequence: EngineSequence,
    ) -> None:
        self._engine = engine
        self._region = region
        self._sink = sink
        self._reported_blocks = have_blocks
        self.sequence = sequence
        self._times = WorkerTimes()
        sequence.prefill_only = True
        if not sequence.min_length > sequence.prompt_tokens:
            sequence.stop_ids = frozenset()  # the other worker ends the answer

    @property
    def holds(self) -> bool:
        """Whether the prompt is computed and the blocks wait for the other worker."""
        return self.sequence.length > self.sequence.prompt_tokens

    def report_blocks(self) -> None:
        """Report the full blocks that were computed since the last call."""
        block_tokens = self._engine.scheduler.pool.block_tokens
        self._report_up_to(self.sequence.computed_tokens // block_tokens)

    def begin(self, started: Started) -> None:
        self._times = started.times or self._times

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        sequence = self.sequence
        self._engine.scheduler.hold(sequence)
        sequence.max_length += 1  # the other worker ends the answer
        self._report_up_to(len(sequence.blocks))
        extra = None if logprobs is None else logprobs[0]
        times = self._times
        first = FirstToken(ids[0], extra, sequence.cached_tokens, times.queue_s, times.prefill_s)
        self._sink.on_first_token(first)
        return True

    def finish(self, end: Finish) -> None:
        del end

    def _report_up_to(self, end: int) -> None:
        first = self._reported_blocks
        if first >= end:
            return
        self._reported_blocks = end
        self._engine.runner.export_blocks(self.sequence, first, end)
        ids = [block.id for block in self.sequence.blocks[first:end]]
        generations = self._region.generations
        self._sink.on_blocks(first, ids, [generations[block] for block in ids])


def report_blocks(
    calls: Iterable[PrefillCall], end: Callable[[EngineSequence, Exception], None]
) -> None:
    """Report the computed blocks of all `calls`. `end` ends the sequence of one that fails."""
    for call in calls:
        try:
            call.report_blocks()
        except Exception as error:  # noqa: BLE001 - one bad call must not end the others
            end(call.sequence, error)
