"""The interface between the step scheduler and the code that computes a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.values import EngineInfo, TokenLogprobs
from dynamo.inference.block import Block
from dynamo.inference.sequence import EngineSequence


class StepChunk(msgspec.Struct, frozen=True):
    """Positions `start` to `start + count` of one sequence, to be computed in this step.

    The tokens there are known (`sequence.tokens[start : start + count]`). The KV of all positions
    before `start` was computed by earlier steps or is loaded from `load_block_ids`.

    - `samples`: the chunk ends with the last known token, so the runner samples the next one. Its
      output position is `sequence.request.resumed + sequence.output_tokens`.
    - `load_block_ids`: blocks of positions 0 to `start`, in order. The runner copies them into the
      sequence's area before it computes. Only the first chunk after an admission has some. The last
      block is loaded in part if `start` is not the end of a block, as after an arrival.
    - `save_blocks`: (block index in the sequence, block id) of blocks that this chunk completes.
      The runner copies them out afterwards. Index i starts at position i * block_tokens. The last
      chunk of a sequence that is `prefill_only` also saves the partial last block.
    - `blocks`: the block table of the sequence, from position 0 on. A runner that keeps KV in place
      writes and reads these blocks, and neither loads nor saves.
    """

    sequence: EngineSequence
    start: int
    count: int
    samples: bool
    load_block_ids: tuple[int, ...] = ()
    save_blocks: tuple[tuple[int, int], ...] = ()
    blocks: Sequence[Block] = ()


class StepPlan(msgspec.Struct):
    """The work of one step. Plan and sequences do not change while the step is computed.

    - `released`: sequences that ended or were preempted since the last plan. The runner frees their
      areas before it computes. A preempted sequence comes again later as a new one.
    - `new_tokens`, `decode_seqs`, `decode_context`, `attention`: the counts of `core/timing`.
    - `back_to_back`: the engine was not idle between the previous step and this one.
    """

    chunks: list[StepChunk] = []
    released: Sequence[EngineSequence] = ()
    new_tokens: int = 0
    decode_seqs: int = 0
    decode_context: int = 0
    attention: float = 0.0
    back_to_back: bool = False

    @property
    def seqs(self) -> int:
        """The number of sequences."""
        return len(self.chunks)


class StepResult(msgspec.Struct, frozen=True):
    """The sampled tokens of a step: one for each chunk with `samples`, in the plan's order.
    `logprobs` is None or has an entry for each token, which is None where none were requested."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None


class BlockShape(msgspec.Struct, frozen=True):
    """The innermost dimensions of a block, which is [..., tokens, channels] of `dtype`."""

    tokens: int
    channels: int
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    @property
    def group_bytes(self) -> int:
        """Bytes of one [tokens, channels] array."""
        return self.tokens * self.channels * (4 if self.dtype == "float32" else 2)


class ModelRunner(ABC):
    """Computes steps, one at a time. Constructors do no I/O. `region` is the memory of the blocks
    after `start`, if peers may read it; `layout` names all that peers must have in common.
    `block_shape`: the dimensions of a block, if it contains numbers. `runs_ahead`: the runner
    computes the next step of decoding sequences before its plan comes, if they have the blocks.
    `can_sleep`: the runner has `sleep` and `wake_up`."""

    region: MemoryRegion | None = None
    layout: str = ""
    block_shape: BlockShape | None = None
    runs_ahead = False
    can_sleep = False

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load the weights and allocate KV memory. Block ids run from 0 to `num_blocks - 1`. There
        are areas for `max_num_seqs` sequences. Raises `ModelUnavailable` or `ConfigError`."""

    @abstractmethod
    async def step(self, plan: StepPlan) -> StepResult:
        """Compute one step and yield to the event loop at least once. An exception fails every
        sequence of the plan; the next plan releases their areas."""

    @abstractmethod
    async def stop(self) -> None:
        """Release everything. A step in progress may be abandoned."""

    async def sleep(self, level: int) -> None:
        """Give memory back as `Engine.sleep` says. No sequence has blocks or an area, but a step in
        progress may use some of them until it ends."""
        raise NotImplementedError

    async def wake_up(self) -> None:
        """Take the memory again. Raises `ModelUnavailable`, also if the weights are others now."""
        raise NotImplementedError

    def export_blocks(self, sequence: EngineSequence, first: int, end: int) -> None:
        """Blocks `first` to `end` of the sequence's prompt are about to be read by a peer. Called
        between steps. The default does nothing: their KV is in `region`."""
        del sequence, first, end

    def export_cached(self, blocks: Sequence[Block]) -> None:
        """Registered blocks are about to be copied to a tier. The default does nothing."""
        del blocks

    def import_blocks(self, sequence: EngineSequence, first: int, end: int) -> None:
        """Blocks `first` to `end` of the sequence have come from a peer. The default does nothing:
        the step that loads them reads `region`."""
        del sequence, first, end


class PredictableModelRunner(ModelRunner):
    """A runner that knows step times in advance, so that a simulation can skip steps."""

    @abstractmethod
    def decode_end_times(self, seqs: int, context: int, steps: int) -> Any:
        """Return the end time of each of the next `steps` steps, on the engine's clock, as a NumPy
        array. The steps only decode `seqs` sequences. `context` is the sum of their lengths in the
        first step."""

    @abstractmethod
    def decode_tokens(
        self, sequences: Sequence[EngineSequence], steps: int
    ) -> Sequence[Sequence[int]]:
        """Sample the next `steps` tokens of each sequence. These tokens then count as computed."""

    @abstractmethod
    def skip_to(self, when: float) -> None:
        """Continue after steps that were skipped; the last of them ended at `when`."""
