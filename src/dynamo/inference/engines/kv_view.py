"""The view of the prefix cache of a rank: its blocks, the reader and the drift check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dynamo.core.values import KvEvent
from dynamo.inference.engines.drift_check import DriftCheck
from dynamo.inference.engines.engine_blocks import EngineBlocks
from dynamo.inference.engines.engine_events import EventBatch
from dynamo.inference.engines.event_reader import KvEventEndpoint, KvEventReader


class EngineKvView:
    """The view of the KV blocks of one rank of a foreign engine.

    The rank passes `on_kv_events` and `snapshot` on, calls `drift.on_submitted` and
    `drift.on_ended` for each request, and `clear` when it has emptied the engine's cache.
    """

    def __init__(
        self,
        block_tokens: int,
        engine_block_tokens: int = 0,
        endpoint: KvEventEndpoint | None = None,
    ) -> None:
        """`endpoint`: where the engine publishes over ZMQ; None for an engine that is polled."""
        self.blocks = EngineBlocks(block_tokens, engine_block_tokens)
        self.reader = (
            None if endpoint is None else KvEventReader(self.blocks, endpoint, self._report)
        )
        self.drift = DriftCheck(self.blocks, self._rebuild, self._report)
        self._listeners: list[Callable[[Sequence[KvEvent]], None]] = []

    @property
    def problem(self) -> str:
        """Why routers must predict this cache, or "" while events tell it."""
        reason = self.blocks.unusable
        return f"KV events of the engine are not used: {reason}" if reason else ""

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` on the loop with the changes of each step."""
        self._listeners.append(listener)

    def snapshot(self) -> Sequence[KvEvent]:
        """Return events that rebuild the view from nothing."""
        return self.blocks.snapshot()

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """Counts by subject and kind: messages of the engine and repairs of the view, blocks that
        the events name in vain or several times, and checks of predictions."""
        subjects = {"blocks": self.blocks.counts, "checks": self.drift.counts}
        if self.reader is not None:
            subjects["messages"] = self.reader.counts
        return {
            (subject, kind): count
            for subject, counts in subjects.items()
            for kind, count in counts.items()
        }

    def open(self) -> None:
        """Start reading, if the engine publishes. Raises `ConfigError`."""
        if self.reader is not None:
            self.reader.open()

    async def close(self) -> None:
        """Stop reading."""
        if self.reader is not None:
            await self.reader.close()

    def clear(self, clears_before: int) -> None:
        """Empty the view after the engine has emptied its cache. `clears_before`: `blocks.clears`
        before the engine was asked. If it has increased since, the engine's own event has come, or
        was lost: no other event would end a reset, and the view stays as the events tell it."""
        if self.blocks.clears == clears_before:
            self._report(self.blocks.reset())

    def give_up(self, reason: str) -> None:
        """Empty the view for good, because of `reason`."""
        self._report(self.blocks.distrust(reason))

    def apply(self, batch: EventBatch) -> None:
        """Apply polled events. After a damaged batch the view starts empty."""
        self.blocks.counts.update(batch.skipped)
        changes = self.blocks.apply(batch.events)
        self._report(self.blocks.clear() if batch.damaged else changes)

    def _rebuild(self) -> None:
        if self.reader is None:
            self._report(self.blocks.clear())
        else:
            self.reader.rebuild()

    def _report(self, changes: Sequence[KvEvent]) -> None:
        if changes:
            for listener in self._listeners:
                listener(changes)
