"""The records that a backend of discovery has told its watches, across outages of its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dynamo.communication.directory import RecordChange

MISSING_GRACE_S: Final = 2.5
"""Time that owners have to put their records again after an outage.

A server that lost its data comes back empty. Records missing then are reported as removed only
after this time.
"""


class GracefulState:
    """Passes changes to `push`, and after an outage the differences to what was told before.

    `records` are those told. Of the records that are missing after an outage, those that stay
    missing are told as removed `MISSING_GRACE_S` later.
    """

    def __init__(self, push: Callable[[Sequence[RecordChange]], None]) -> None:
        self._push = push
        self._missing: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.records: dict[str, bytes] = {}

    def apply(self, changes: Sequence[RecordChange]) -> None:
        """Pass changes on, in order."""
        for change in changes:
            self._missing.discard(change.key)
            if change.value is None:
                self.records.pop(change.key, None)
            else:
                self.records[change.key] = change.value
        self._push(changes)

    def replace(self, state: Mapping[str, bytes]) -> None:
        """Pass the differences to a state on that was read after an outage."""
        self.close()
        records = self.records
        self.apply(
            [RecordChange(key, value) for key, value in state.items() if records.get(key) != value]
        )
        self._missing = records.keys() - state.keys()
        if self._missing:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(MISSING_GRACE_S, self._remove_missing)

    def close(self) -> None:
        """Tell no more about missing records."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _remove_missing(self) -> None:
        self._timer = None
        self.apply([RecordChange(key, None) for key in sorted(self._missing)])
