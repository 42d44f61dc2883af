"""What changed in a block pool, gathered as events."""

from __future__ import annotations

from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent


class EventLog:
    """Gathers what changed since the last `take`, chains and removals as runs."""

    __slots__ = ("_events", "_parent", "_run", "_stored")

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._run: list[int] = []
        self._stored = True
        self._parent = 0

    def stored(self, parent: int, block_hash: int) -> None:
        """A block is held now."""
        run = self._run
        if not (run and self._stored and run[-1] == parent):
            self._end_run()
            self._stored = True
            self._parent = parent
            run = self._run
        run.append(block_hash)

    def removed(self, block_hash: int) -> None:
        """A block is not held any more."""
        if self._stored:
            self._end_run()
            self._stored = False
        self._run.append(block_hash)

    def cleared(self) -> None:
        """Nothing is held any more: what came before does not matter."""
        self._run = []
        self._events = [BlocksCleared()]

    def take(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        if self._run:
            self._end_run()
        events = self._events
        if events:
            self._events = []
        return events

    def _end_run(self) -> None:
        if not self._run:
            return
        hashes = tuple(self._run)
        self._run = []
        self._events.append(
            BlocksStored(self._parent, hashes) if self._stored else BlocksRemoved(hashes)
        )
