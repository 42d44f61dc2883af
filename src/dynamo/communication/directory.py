"""What one plane may know of who is there, without knowing the discovery plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec


class RecordChange(msgspec.Struct, frozen=True):
    """A key has a value now; `value` None: the key is gone."""

    key: str
    value: bytes | None


RecordWatch = AsyncIterator[Sequence[RecordChange]]


class Directory(Protocol):
    """The part of `Discovery` that the event plane finds its publishers by."""

    async def put(self, key: str, value: bytes) -> None:
        """Write or replace a record of this process."""

    async def delete(self, key: str) -> None:
        """Remove a record of this process."""

    def watch(self, prefix: str) -> AbstractAsyncContextManager[RecordWatch]:
        """Present state first, then changes."""
