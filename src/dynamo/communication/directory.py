"""The part of discovery that the event plane needs, so that it does not depend on the plane, and
the loop of all who follow records."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, Protocol

import msgspec

from dynamo.core.clock import Clock

log = logging.getLogger(__name__)

WATCH_RETRY_S = 0.5


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


async def follow_records(
    directory: Directory,
    prefix: str,
    apply: Callable[[Sequence[RecordChange], bool], Awaitable[None] | None],
    clock: Clock,
) -> NoReturn:
    """Call `apply(batch, replaces)` until cancelled. `replaces`: the batch has all present records.
    A watch that fails is restarted: what is known stays until it works again."""
    while True:
        try:
            async with directory.watch(prefix) as changes:
                replaces = True
                async for batch in changes:
                    if (work := apply(batch, replaces)) is not None:
                        await work
                    replaces = False
        except Exception as error:  # noqa: BLE001 - the next watch may work
            fields = {"prefix": prefix, "error": str(error) or type(error).__name__}
            log.warning("discovery watch failed", extra={"fields": fields})
        await clock.sleep(WATCH_RETRY_S)
