"""The part of discovery that the event plane needs, so that it does not depend on the plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec


class RecordChange(msgspec.Struct, frozen=True):
    """A key's new value. None means that the key was removed."""

    key: str
    value: bytes | None


RecordWatch = AsyncIterator[Sequence[RecordChange]]


class Directory(Protocol):
    """The part of `Discovery` through which the event plane finds publishers."""

    async def put(self, key: str, value: bytes) -> None:
        """Write or replace a record of this process."""

    async def delete(self, key: str) -> None:
        """Remove a record of this process."""

    def watch(self, prefix: str) -> AbstractAsyncContextManager[RecordWatch]:
        """Watch a prefix: the current records first, then changes."""
