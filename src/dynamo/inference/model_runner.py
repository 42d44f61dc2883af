"""The seam between scheduling a step and computing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Listed

import msgspec

from dynamo.core.values import EngineInfo, TokenLogprobs
from dynamo.inference.sequence import EngineSequence


class StepChunk(msgspec.Struct, frozen=True):
    """Compute positions `start` to `start + count` of one sequence.

    The tokens at those positions are known (`sequence.tokens[start : start + count]`), and the KV
    of everything before `start` is there: computed by earlier steps, or copied in by `load`.
    `samples`: the chunk reaches the end of what is known, so the token after it is to be sampled
    (at output position `sequence.request.resumed + sequence.output_tokens`).
    `load`: ids of the blocks that hold positions 0 to `start`, in order, to be copied into the
    sequence's area before computing; only in the first chunk after admission.
    `save`: (block index in the sequence, block id) of blocks that this chunk completes, to be
    copied out after computing; index i covers positions i * block_tokens and on.
    """

    sequence: EngineSequence
    start: int
    count: int
    samples: bool
    load_block_ids: tuple[int, ...] = ()
    save_blocks: tuple[tuple[int, int], ...] = ()


class StepPlan(msgspec.Struct, frozen=True):
    """One step of the engine. Nothing named in it changes while the step is computed.

    `released`: sequences that ended or were preempted since the last plan: their areas are free
    (a preempted one comes again as if new, with `load`). They are given back before any chunk.
    `new_tokens`: prompt tokens to compute (chunks that decode a single known token do not count).
    `decode_seqs`, `decode_context`: how many chunks decode, and the sum of their context lengths.
    `continues`: the engine was not idle between the last step and this one.
    """

    chunks: Listed[StepChunk]
    released: Listed[EngineSequence] = ()
    new_tokens: int = 0
    decode_seqs: int = 0
    decode_context: int = 0
    back_to_back: bool = False


class StepResult(msgspec.Struct, frozen=True):
    """`tokens`: one id for every chunk that samples, in the plan's order. `logprobs`: None, or one
    entry for each of `tokens` (None where the request asked for none)."""

    tokens: Listed[int]
    logprobs: Listed[TokenLogprobs | None] | None = None


class ModelRunner(ABC):
    """Computes steps. Constructors do no I/O; one step at a time."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load weights, reserve storage for `num_blocks` blocks (ids 0 to num_blocks - 1) and
        areas for `max_num_seqs` sequences. Raises `ModelUnavailable` or `ConfigError`."""

    @abstractmethod
    async def step(self, plan: StepPlan) -> StepResult:
        """Compute one step. Gives the loop at least one turn. An exception fails every sequence
        of the plan and their areas are released."""

    @abstractmethod
    async def stop(self) -> None:
        """Release everything; a step in hand may be abandoned."""


class PredictableModelRunner(ModelRunner):
    """Knows how long steps will take: a simulation may take many of them at once."""

    @abstractmethod
    def decode_end_times(self, seqs: int, context: int, steps: int) -> list[float]:
        """When (on the engine's clock) each of the next steps would end, were they only to decode
        `seqs` sequences; `context`: the sum of their lengths in the first."""

    @abstractmethod
    def decode_tokens(self, sequences: Listed[EngineSequence], steps: int) -> Listed[Listed[int]]:
        """What the next `steps` steps would sample for each of `sequences`, were they only to
        decode. Asked once: they are taken as computed."""

    @abstractmethod
    def skip_to(self, when: float) -> None:
        """The steps up to the one that ends at `when` were taken without `step`."""
