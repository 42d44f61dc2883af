"""A worker keeps blocks for others: of the prompts that it computes for them, and of the requests
that leave it while it drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded
from dynamo.core.tasks import wait_at_most
from dynamo.core.values import GenerateRequest
from dynamo.inference.kv_source import FirstToken, PrefillSink

if TYPE_CHECKING:
    from dynamo.inference.engine import BatchedEngine

HOLD_S = 10.0
"""The blocks of a computed prompt are held for this time, and longer if they are many."""
HANDOVER_S = 2.0
"""A worker that takes over a request asks for its blocks within this time, or does without them."""
MIN_BYTES_PER_S = 100e6
"""A slower transfer of the blocks may exceed the time for which they are held."""


async def compute_for_peer(
    engine: BatchedEngine,
    request: GenerateRequest,
    context: Context,
    have_blocks: int,
    sink: PrefillSink,
) -> None:
    """Compute a prompt for another worker, as `BatchedEngine.prefill` does, and hold its blocks
    until the call is cancelled. Raises `DeadlineExceeded` if that does not happen in time, which
    frees the blocks: the other worker may be frozen."""
    region = engine.runner.region
    block_bytes = 0 if region is None else region.slot_bytes
    hold_s = HOLD_S
    try:
        async with asyncio.timeout(None) as limit:
            loop = asyncio.get_running_loop()

            def on_computed(blocks: int) -> None:
                limit.reschedule(loop.time() + hold_s + blocks * block_bytes / MIN_BYTES_PER_S)

            await engine.prefill(request, context, have_blocks, _Watched(sink, on_computed))
    except TimeoutError:
        text = f"the blocks of the prompt were not taken for {hold_s:.0f} s and are free now"
        raise DeadlineExceeded(text) from None


class _Watched(PrefillSink):
    """A sink that counts blocks and reports when the prompt is computed."""

    def __init__(self, sink: PrefillSink, on_computed: Callable[[int], None]) -> None:
        self._sink = sink
        self._on_computed = on_computed
        self._blocks = 0

    def on_queued(self, tokens: int) -> None:
        self._sink.on_queued(tokens)

    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        self._blocks += len(block_ids)
        return self._sink.on_blocks(first, block_ids, generations)

    def on_first_token(self, first: FirstToken) -> bool:
        self._on_computed(self._blocks)
        return self._sink.on_first_token(first)


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
