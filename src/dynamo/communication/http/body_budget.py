"""The memory for request bodies that no handler has read."""

from __future__ import annotations

from dynamo.communication.http.limits import HttpLimits
from dynamo.core.errors import Overloaded

LARGE_BODY_BYTES = 64 << 10
"""Larger bodies may fill only a part of the budget, so that normal requests continue."""
LARGE_SHARE = 7 / 8


class BodyHold:
    """The bytes of one body in a budget. `release` may be called more than once."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def resize(self, size: int) -> None:
        """Count `size` bytes for this body."""
        self._budget.held_bytes += size - self.size
        self.size = size

    def release(self) -> None:
        """Count nothing for this body."""
        self.resize(0)


class BodyBudget:
    """The bytes of all bodies of a server that arrived in part or wait for their handler.

    A body of at most `LARGE_BODY_BYTES` that arrives with one read and is handled at once is never
    counted. `max_body_bytes` limits each body; it may change while serving.
    """

    def __init__(self, limits: HttpLimits | None = None) -> None:
        limits = limits or HttpLimits()
        self.max_body_bytes = limits.max_body_bytes
        self.max_held_bytes = limits.max_buffered_bytes
        self.held_bytes = 0

    def check(self, size: int) -> None:
        """Raise `Overloaded` if a body of `size` bytes, which are counted, must be refused."""
        share = LARGE_SHARE if size > LARGE_BODY_BYTES else 1
        if self.held_bytes > self.max_held_bytes * share:
            raise Overloaded(
                f"the bodies of unfinished requests exceed {self.max_held_bytes} bytes",
                hint="send the request again; server.max_buffered_bytes sets the limit",
                retry_after_s=1,
            )
