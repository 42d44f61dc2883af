"""Computes the next step of a decoding batch while the host delivers tokens and plans that step.

The forward pass of the next step needs the sampled tokens, which are on the device, and blocks,
which the plan names. So it is launched before the host knows the tokens. Its logits are sampled
once the next plan has come. A sequence that has ended meanwhile leaves its row unused; its key and
value lie in a block that nobody reads before it is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from dynamo.inference.model_runner import StepChunk, StepPlan
from dynamo.inference.torch.batch import PagedBatch, make_paged_batch

if TYPE_CHECKING:
    from dynamo.inference.sequence import EngineSequence


class _AheadRow(NamedTuple):
    """A computed position of a sequence, the block that has its key, and its row of logits."""

    position: int
    block: int
    row: int


class RunAhead:
    """The step that is computed ahead, if there is one."""

    def __init__(
        self,
        forward: Callable[[PagedBatch], torch.Tensor],
        block_tokens: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._block_tokens = block_tokens
        self._device = device
        self._rows: Mapping[EngineSequence, _AheadRow] = {}
        self._logits: torch.Tensor
        self.used_rows = 0

    def start(self, plan: StepPlan, tokens: torch.Tensor) -> None:
        """Compute the step after `plan`, whose tokens are on the device. Nothing happens if the
        plan does more than decode, or a sequence has no block for its next position."""
        if plan.decode_seqs < len(plan.chunks):
            return
        places = [
            place
            for place, chunk in enumerate(plan.chunks)
            if chunk.start + 2 < chunk.sequence.max_length
        ]
        chunks = [self._next_chunk(plan.chunks[place]) for place in places]
        if not chunks or any(self._block(chunk) is None for chunk in chunks):
            return
        if len(chunks) < len(plan.chunks):
            tokens = tokens[places]
        batch = make_paged_batch(chunks, self._block_tokens, self._device, tokens)
        self._logits = self._forward(batch)
        self._rows = {
            chunk.sequence: _AheadRow(chunk.start, block, row)
            for row, chunk in enumerate(chunks)
            if (block := self._block(chunk)) is not None
        }

    def take(self, chunks: Sequence[StepChunk]) -> Mapping[int, int]:
        """Return the rows of logits of those chunks that are computed, by their numbers."""
        ahead, self._rows = self._rows, {}
        if not ahead:
            return {}
        rows = {}
        for number, chunk in enumerate(chunks):
            known = ahead.get(chunk.sequence)
            place = (chunk.start, self._block(chunk), chunk.count)
            if known is not None and place == (known.position, known.block, 1):
                rows[number] = known.row
        self.used_rows += len(rows)
        return rows

    def join(
        self, rows: Mapping[int, int], chunks: Sequence[StepChunk], others: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits of all sampled chunks in order. `others`: those not in `rows`."""
        if others is not None and not len(others):
            others = None
        if others is None and list(rows.values()) == list(range(len(self._logits))):
            return self._logits
        after = len(self._logits)
        order = []
        for number, chunk in enumerate(chunks):
            if number in rows:
                order.append(rows[number])
            elif chunk.samples:
                order.append(after)
                after += 1
        logits = self._logits if others is None else torch.cat((self._logits, others))
        return logits[order]

    def _next_chunk(self, chunk: StepChunk) -> StepChunk:
        return StepChunk(chunk.sequence, chunk.start + 1, 1, True, blocks=chunk.blocks)

    def _block(self, chunk: StepChunk) -> int | None:
        """Return the block that the chunk is written to; None: there is none yet."""
        place = chunk.start // self._block_tokens
        return chunk.blocks[place].id if place < len(chunk.blocks) else None
