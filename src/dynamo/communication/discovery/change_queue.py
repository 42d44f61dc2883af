"""The queue of changes between a discovery backend and one watch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from dynamo.communication.directory import RecordChange


class ChangeQueue:
    """Queue of a watch's changes, read as an async iterator of batches.

    Changes of one key are merged, so that a slow reader costs at most one entry per key. The first
    batch may be empty, later ones are not.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._pending: dict[str, bytes | None] = {}
        self._ready = asyncio.Event()
        self._error: BaseException | None = None

    def start(self, state: Mapping[str, bytes]) -> None:
        """Queue the current state as the first batch, even if it is empty."""
        self._merge(state.items())
        self._ready.set()

    def push(self, changes: Iterable[RecordChange]) -> None:
        """Queue changes in order. Keys outside the prefix are ignored."""
        self._merge((change.key, change.value) for change in changes)
        if self._pending:
            self._ready.set()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the reader."""
        self._error = error
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
        if self._error is not None:
            raise self._error
        self._ready.clear()
        batch = [RecordChange(key, value) for key, value in self._pending.items()]
        self._pending.clear()
        return batch
