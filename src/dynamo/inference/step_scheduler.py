"""What the next step computes: continuous batching with chunked prefill under one token budget.

Running sequences come first, in order of admission within their priority; then waiting ones are
admitted while tokens, places and blocks are left. When blocks run out the last running sequence is
preempted: its blocks are given back and it is computed again later (what is still cached is hit).
Pure: no clock, no loop, no token ids unless the content has them. Source: vLLM's V1 scheduler,
nano-vllm.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence as Listed
from typing import Literal

import msgspec

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.inference.block import Block
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.model_runner import StepChunk, StepPlan
from dynamo.inference.sequence import EngineSequence

HitsFrom = Literal["scheduled", "computed"]


class BatchLimits(msgspec.Struct, frozen=True):
    """`context_tokens`: the longest sequence, prompt and output."""

    max_num_seqs: int
    max_num_batched_tokens: int
    context_tokens: int


class StepPlanBuilder:
    """A plan in the making."""

    __slots__ = ("budget", "chunks", "decode_context", "decode_seqs", "new_tokens", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[StepChunk] = []
        self.new_tokens = 0
        self.decode_seqs = 0
        self.decode_context = 0
        self.preempted = False


def admission_order(sequence: EngineSequence) -> tuple[int, int]:
    """Who is admitted first: the higher priority, then the earlier arrival."""
    return -sequence.priority, sequence.arrival


def running_order(sequence: EngineSequence) -> int:
    """Order among the running: the higher priority; insertion keeps the order of admission."""
    return -sequence.priority


class StepScheduler:
    """Owns the queue of one engine and the blocks of its sequences.

    `hits_from`: a full block may be hit by another sequence from the moment it is "scheduled" (for
    engines without real KV) or from the end of the step that "computed" it.
    """

    def __init__(
        self, pool: BlockPool, limits: BatchLimits, *, hits_from: HitsFrom = "computed"
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.context_tokens = min(limits.context_tokens, pool.num_blocks * pool.block_tokens)
        self.running: list[EngineSequence] = []
        self.waiting: list[EngineSequence] = []
        self.preemptions = 0
        self._block_tokens = pool.block_tokens
        self._registers_at_schedule = hits_from == "scheduled"
        self._saves_blocks = not self._registers_at_schedule and pool.prefix_caching
        self._released: list[EngineSequence] = []
        self._arrivals = 0
        self._had_work = False
        self._batch_changed = True

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence. Raises `InvalidRequest` for an empty one, and
        `ContextLengthExceeded` for one that can never run."""
        if sequence.length == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if sequence.length >= self.context_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {sequence.length} tokens and leaves no room for an answer: "
                f"this engine holds {self.context_tokens}",
                hint="shorten the prompt, or give the engine more blocks (--num-blocks)",
            )
        sequence.max_length = min(sequence.max_length, self.context_tokens)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._batch_changed = True
        insort(self.waiting, sequence, key=admission_order)

    def remove(self, sequence: EngineSequence) -> None:
        """The sequence has ended or is not wanted any more: its blocks are free at once. Also
        while a step with it is computed; what that step brings for it is ignored."""
        if sequence.ended:
            return
        sequence.ended = True
        self._batch_changed = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        if sequence in self.running:
            self.running.remove(sequence)
        self._release_blocks(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        self._batch_changed = False
        draft = StepPlanBuilder(self.limits.max_num_batched_tokens)
        self._plan_running(draft)
        if self.waiting and not draft.preempted:
            self._plan_waiting(draft)
        continues, self._had_work = self._had_work, bool(draft.chunks)
        if not draft.chunks:
            return None
        released, self._released = self._released, []
        return StepPlan(
            draft.chunks,
            released,
            draft.new_tokens,
            draft.decode_seqs,
            draft.decode_context,
            continues,
        )

    def complete(self, plan: StepPlan, tokens: Listed[int]) -> None:
        """The step was computed; `tokens`: one for every chunk that samples."""
        sampled = iter(tokens)
        block_tokens = self._block_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            token = next(sampled) if chunk.samples else -1
            if sequence.ended:
                continue
            sequence.computed_tokens = computed = chunk.start + chunk.count
            if computed // block_tokens > sequence.registered_blocks:
                self._register_full_blocks(sequence, computed // block_tokens)
            if chunk.samples:
                sequence.content.append_token(token)
                sequence.length += 1

    def steady_steps(self, plan: StepPlan) -> int:
        """How many steps would follow `plan`, the last one completed, in which every sequence only
        decodes one more token, none can end and none waits for blocks. 0 where something changed
        since it was planned, or it did more than decode. Whoever waits now could not be admitted
        then, and cannot be while blocks only get fewer."""
        running = self.running
        if self._batch_changed or not plan.decode_seqs == len(plan.chunks) == len(running):
            return 0
        if any(sequence.stop_ids for sequence in running):
            return 0
        steps = min(sequence.max_length - sequence.length for sequence in running) - 1
        if self._blocks_needed(steps) <= self.pool.available:
            return steps
        return bisect_right(range(steps), self.pool.available, key=self._blocks_needed) - 1

    def advance(self, steps: int, sampled: Listed[Listed[int]]) -> None:
        """`steps` steps of `steady_steps` were computed; `sampled`: by each running sequence."""
        block_tokens = self._block_tokens
        for sequence, tokens in zip(self.running, sampled, strict=True):
            sequence.computed_tokens = computed = sequence.computed_tokens + steps
            sequence.length += steps
            need = -(-computed // block_tokens) - len(sequence.blocks)
            if need > 0:
                sequence.blocks += self.pool.allocate(need)
            sequence.content.append_tokens(tokens)
            if computed // block_tokens > sequence.registered_blocks:
                self._register_full_blocks(sequence, computed // block_tokens)

    def _blocks_needed(self, steps: int) -> int:
        """Blocks that so many more tokens of every running sequence want."""
        block_tokens = self._block_tokens
        return sum(
            max(0, -(-(sequence.computed_tokens + steps) // block_tokens) - len(sequence.blocks))
            for sequence in self.running
        )

    def prefill_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        left = sum(sequence.length for sequence in self.waiting)
        for sequence in self.running:
            to_do = sequence.length - sequence.computed_tokens
            left += to_do if to_do > 1 else 0
        return left

    def _plan_running(self, draft: StepPlanBuilder) -> None:
        running = self.running
        block_tokens = self._block_tokens
        index = 0
        while index < len(running) and draft.budget:
            sequence = running[index]
            start = sequence.computed_tokens
            count = min(sequence.length - start, draft.budget)
            end = start + count
            if end > len(sequence.blocks) * block_tokens and not self._allocate_up_to(
                draft, sequence, end
            ):
                return
            self._add_chunk(draft, sequence, start, count, ())
            index += 1

    def _plan_waiting(self, draft: StepPlanBuilder) -> None:
        """Admit while tokens, places and blocks are left. The whole of what is known of a sequence
        must find room now, or it would only be preempted."""
        pool, waiting = self.pool, self.waiting
        while waiting and draft.budget and len(self.running) < self.limits.max_num_seqs:
            sequence = waiting[0]
            full = (sequence.length - 1) // self._block_tokens
            sequence.content.ensure_hashes(full)
            hits = pool.match(sequence.content.hashes[:full]) if pool.prefix_caching else []
            need = -(-sequence.length // self._block_tokens) - len(hits)
            if need > pool.available - pool.count_unreferenced(hits):
                return
            del waiting[0]
            self._admit(draft, sequence, hits)

    def _admit(self, draft: StepPlanBuilder, sequence: EngineSequence, hits: list[Block]) -> None:
        start = len(hits) * self._block_tokens
        count = min(sequence.length - start, draft.budget)
        self.pool.reference(hits)
        need = -(-(start + count) // self._block_tokens) - len(hits)
        sequence.blocks = hits + self.pool.allocate(need)
        sequence.registered_blocks = len(hits)
        sequence.computed_tokens = start
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached_tokens = start
        insort(self.running, sequence, key=running_order)
        load = tuple(block.id for block in hits)
        self._add_chunk(draft, sequence, start, count, load, admission=True)

    def _add_chunk(
        self,
        draft: StepPlanBuilder,
        sequence: EngineSequence,
        start: int,
        count: int,
        load: tuple[int, ...],
        admission: bool = False,
    ) -> None:
        end = start + count
        samples = end == sequence.length
        save: tuple[tuple[int, int], ...] = ()
        full = end // self._block_tokens
        if full > sequence.registered_blocks:
            if self._registers_at_schedule:
                self._register_full_blocks(sequence, full)
            elif self._saves_blocks:
                blocks = sequence.blocks
                save = tuple((at, blocks[at].id) for at in range(sequence.registered_blocks, full))
        draft.chunks.append(StepChunk(sequence, start, count, samples, load, save))
        draft.budget -= count
        if samples and count == 1 and not admission and sequence.length > sequence.prompt_tokens:
            draft.decode_seqs += 1
            draft.decode_context += end
        else:
            draft.new_tokens += count

    def _allocate_up_to(self, draft: StepPlanBuilder, sequence: EngineSequence, end: int) -> bool:
        """Blocks for positions up to `end`, preempting from the last; False: it was this one."""
        need = -(-end // self._block_tokens) - len(sequence.blocks)
        while need > self.pool.available:
            victim = self.running.pop()
            self._preempt(victim)
            draft.preempted = self._batch_changed = True
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(need)
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        self._release_blocks(sequence)
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.computed_tokens = sequence.registered_blocks = 0
        insort(self.waiting, sequence, key=admission_order)

    def _release_blocks(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._released.append(sequence)

    def _register_full_blocks(self, sequence: EngineSequence, full: int) -> None:
        content, blocks, pool = sequence.content, sequence.blocks, self.pool
        content.ensure_hashes(full)
        hashes = content.hashes
        for index in range(sequence.registered_blocks, full):
            above = blocks[index - 1] if index else None
            parent = hashes[index - 1] if index else content.root
            blocks[index] = pool.register(blocks[index], above, parent, hashes[index])
        sequence.registered_blocks = full
