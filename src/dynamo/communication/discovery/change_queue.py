"""What waits for one watcher: changes merged by key, so that a slow one costs no more memory than
there are keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from dynamo.communication.directory import RecordChange


class ChangeQueue:
    """One watch; an async iterator of batches. The first batch may be empty, later ones are not."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._pending: dict[str, bytes | None] = {}
        self._ready = asyncio.Event()

    def start(self, state: Mapping[str, bytes]) -> None:
        """The present state: the first batch, even where it is empty."""
        self._merge(state.items())
        self._ready.set()

    def push(self, changes: Iterable[RecordChange]) -> None:
        """Changes in order; those of other prefixes are left out."""
        self._merge((change.key, change.value) for change in changes)
        if self._pending:
            self._ready.set()

    def _merge(self, records: Iterable[tuple[str, bytes | None]]) -> None:
        for key, value in records:
            if key.startswith(self.prefix):
                self._pending.pop(key, None)
                self._pending[key] = value

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[RecordChange]:
        await self._ready.wait()
        self._ready.clear()
        batch = [RecordChange(key, value) for key, value in self._pending.items()]
        self._pending.clear()
        return batch
