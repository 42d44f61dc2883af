"""CUDA graphs of steps that only decode: one launch instead of hundreds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from dynamo.inference.torch.batch import PagedBatch, make_spare_batch

if TYPE_CHECKING:
    Forward = Callable[[PagedBatch], torch.Tensor]
    Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""The numbers of sequences with a graph of their own. Other steps are padded to the next one."""


class DecodeGraphs:
    """The graphs of one model. `width`: the blocks of the longest context. Rows that pad a step
    compute one token in `spare_block`, which belongs to no sequence."""

    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        width: int,
        spare_block: int,
        block_tokens: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._spare_block, self._spare_slot = spare_block, spare_block * block_tokens
        last = bisect_left(GRAPH_SIZES, max_num_seqs)
        self._sizes = GRAPH_SIZES[: last + 1]
        self._batches: dict[int, PagedBatch] = {}
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}
        capture = capture or CudaCapture()
        for size in reversed(self._sizes):  # the largest one makes the memory that all share
            batch = make_spare_batch(size, 1, width, spare_block, block_tokens, device)
            self._batches[size] = batch
            self._replays[size] = capture(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def run(self, batch: PagedBatch) -> torch.Tensor | None:
        """Return the logits of a step, until the next call; None for a step without a graph."""
        count = len(batch.spans)
        place = bisect_left(self._sizes, count)
        if batch.decoding < count or place == len(self._sizes):
            return None
        static = self._batches[self._sizes[place]]
        for field in ("token_ids", "positions", "slots", "lengths"):
            getattr(static, field)[:count].copy_(getattr(batch, field))
        static.tables[:count, : batch.tables.shape[1]].copy_(batch.tables)
        static.slots[count:] = self._spare_slot
        static.lengths[count:] = 1
        static.tables[count:, 0] = self._spare_block
        return self._replays[self._sizes[place]]()[batch.sampled_rows]


class CudaCapture:
    """Captures graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        compute()  # compiles kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
