"""`Handover`: a draining worker serves its KV memory until other workers have its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo.core.clock import Clock
from dynamo.core.tasks import wait_at_most
from dynamo.core.values import GenerateRequest

HANDOVER_S = 2.0
"""A worker that takes over a request asks for its blocks within this time, or does without them."""


class Handover:
    """Counts the open `prefill` calls of a worker, and the requests that left it while it drains
    and for which no such call has come yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: set[tuple[str, int]] = set()
        self._open_calls = 0
        self._changed = asyncio.Event()

    def on_request_left(self, request: GenerateRequest) -> None:
        """Expect the worker to which this request was moved."""
        self._left.add((request.request_id, request.choice))

    @contextmanager
    def track_call(self, request: GenerateRequest) -> Iterator[None]:
        """Count the body of the `with` statement as a call for the blocks of `request`."""
        self._left.discard((request.request_id, request.choice))
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1
            self._changed.set()

    async def wait_until_done(self) -> None:
        """Return when no call is open and none is expected any more."""
        until = self._clock.now() + HANDOVER_S
        while self._open_calls or (self._left and self._clock.now() < until):
            self._changed.clear()
            wait_s = None if self._open_calls else until - self._clock.now()
            await wait_at_most(self._changed.wait(), wait_s)
