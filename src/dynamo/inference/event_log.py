"""What changed in a block pool, gathered as events."""

from __future__ import annotations

from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent


class KvEventBuffer:
    """Gathers what changed since the last `take`, chains and removals as runs."""

    __slots__ = ("_events", "_hash_run", "_run_is_stored", "_run_parent")

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._hash_run: list[int] = []
        self._run_is_stored = True
        self._run_parent = 0

    def add_stored(self, parent: int, block_hash: int) -> None:
        """A block is held now."""
        run = self._hash_run
        if not (run and self._run_is_stored and run[-1] == parent):
            self._end_run()
            self._run_is_stored = True
            self._run_parent = parent
            run = self._hash_run
        run.append(block_hash)

    def add_removed(self, block_hash: int) -> None:
        """A block is not held any more."""
        if self._run_is_stored:
            self._end_run()
            self._run_is_stored = False
        self._hash_run.append(block_hash)

    def add_cleared(self) -> None:
        """Nothing is held any more: what came before does not matter."""
        self._hash_run = []
        self._events = [BlocksCleared()]

    def drain(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        if self._hash_run:
            self._end_run()
        events = self._events
        if events:
            self._events = []
        return events

    def _end_run(self) -> None:
        if not self._hash_run:
            return
        hashes = tuple(self._hash_run)
        self._hash_run = []
        self._events.append(
            BlocksStored(self._run_parent, hashes) if self._run_is_stored else BlocksRemoved(hashes)
        )
