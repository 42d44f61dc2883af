"""A prompt that an engine computes for another worker, which has to take its blocks in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded
from dynamo.core.values import GenerateRequest
from dynamo.inference.kv_source import FirstToken, PrefillSink

if TYPE_CHECKING:
    from dynamo.inference.engine import BatchedEngine

HOLD_S = 10.0
"""The blocks of a computed prompt are held for this time, and longer if they are many."""
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
