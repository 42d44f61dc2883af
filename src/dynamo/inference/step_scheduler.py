"""Plans the steps of an engine: continuous batching with chunked prefill under a token budget.

A plan takes the running sequences first, by priority and then in the order of admission. Waiting
sequences are admitted while tokens, batch slots and blocks are left. If blocks run out, the last
running sequence is preempted: its blocks are released and it is computed again later, starting with
the part that is still cached.

The scheduler uses no clock and no event loop, and reads no token ids. Source: vLLM's V1 scheduler,
nano-vllm.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Literal

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.values import EngineInfo
from dynamo.inference.block import Block
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.model_runner import StepChunk, StepPlan
from dynamo.inference.sequence import EngineSequence

MAX_MATCHED_BLOCKS = 32_768
"""So many cached blocks are matched in one step, since each costs a microsecond of the loop."""

HitsFrom = Literal["scheduled", "computed"]
"""When other sequences can reuse a full block: as soon as its step is planned (for engines without
real KV), or when the step that computes it has ended."""


def admission_order(sequence: EngineSequence) -> tuple[int, int]:
    """Sort key of waiting sequences: the higher priority first, then the earlier arrival."""
    return -sequence.priority, sequence.arrival


def running_order(sequence: EngineSequence) -> int:
    """Sort key of running sequences: the higher priority first. Insertion keeps the admission
    order."""
    return -sequence.priority


class StepScheduler:
    """Owns the queues of one engine; `pool` owns the blocks. Of `limits` only the sizes of a batch
    and the context count; the context limits prompt and output of one sequence together."""

    def __init__(
        self, pool: BlockPool, limits: EngineInfo, *, hits_from: HitsFrom = "computed"
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
        self._budget = 0
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
        """End a sequence and release its blocks. A second call changes nothing. May be called while
        a step computes the sequence. The result of that step is then ignored for it."""
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
        """Return the next step, or None if there is nothing to do."""
        self._batch_changed = False
        self._budget = self.limits.max_num_batched_tokens
        plan = StepPlan(back_to_back=self._had_work)
        self._plan_running(plan)
        if self.waiting and not self._batch_changed:  # no sequence was preempted
            self._plan_waiting(plan)
        self._had_work = bool(plan.chunks)
        if not plan.chunks:
            return None
        plan.released, self._released = self._released, []
        return plan

    def complete(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        """Apply a computed step. `tokens` has one entry for each chunk with `samples`."""
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
        """Count the steps after the completed `plan` that would only decode the same batch.

        In each of them every running sequence decodes one token, none ends and none waits for
        blocks. The count is 0 if the batch has changed since the plan, or the plan did more than
        decode. Waiting sequences do not matter: they could not be admitted then, and blocks only
        get fewer.
        """
        running = self.running
        if self._batch_changed or not plan.decode_seqs == len(plan.chunks) == len(running):
            return 0
        if any(sequence.stop_ids for sequence in running):
            return 0
        steps = min(sequence.max_length - sequence.length for sequence in running) - 1
        if self._blocks_needed(steps) <= self.pool.available:
            return steps
        return bisect_right(range(steps), self.pool.available, key=self._blocks_needed) - 1

    def advance(self, steps: int, sampled: Sequence[Sequence[int]]) -> None:
        """Apply `steps` steady steps at once. `sampled` has the tokens of each running sequence."""
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
        """Count the blocks needed for `steps` more tokens of every running sequence."""
        block_tokens = self._block_tokens
        return sum(
            max(0, -(-(sequence.computed_tokens + steps) // block_tokens) - len(sequence.blocks))
            for sequence in self.running
        )

    def prefill_tokens(self) -> int:
        """Count the prompt tokens that are still to be computed."""
        tokens = sum(sequence.length for sequence in self.waiting)
        for sequence in self.running:
            uncomputed = sequence.length - sequence.computed_tokens
            tokens += uncomputed if uncomputed > 1 else 0
        return tokens

    def _plan_running(self, plan: StepPlan) -> None:
        running = self.running
        block_tokens = self._block_tokens
        index = 0
        while index < len(running) and self._budget:
            sequence = running[index]
            start = sequence.computed_tokens
            count = min(sequence.length - start, self._budget)
            end = start + count
            allocated = end <= len(sequence.blocks) * block_tokens
            if not allocated and not self._allocate_up_to(sequence, end):
                return
            self._add_chunk(plan, sequence, start, count, ())
            index += 1

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit sequences while tokens, batch slots and blocks are left. A sequence is admitted
        only if all its known tokens fit into free blocks now. Otherwise it would soon be
        preempted."""
        pool, waiting = self.pool, self.waiting
        matched = 0
        while waiting and self._budget and len(self.running) < self.limits.max_num_seqs:
            if matched > MAX_MATCHED_BLOCKS:
                return
            sequence = waiting[0]
            full = (sequence.length - 1) // self._block_tokens
            sequence.content.ensure_hashes(full)
            content, hits = sequence.content, []
            if pool.prefix_caching:
                hits = pool.match(content.hashes[:full], content.fingerprint)
            need = -(-sequence.length // self._block_tokens) - len(hits)
            if need > pool.available - pool.count_unreferenced(hits):
                return
            matched += len(hits)
            del waiting[0]
            self._admit(plan, sequence, hits)

    def _admit(self, plan: StepPlan, sequence: EngineSequence, hits: list[Block]) -> None:
        start = len(hits) * self._block_tokens
        count = min(sequence.length - start, self._budget)
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
        self._add_chunk(plan, sequence, start, count, load, admission=True)

    def _add_chunk(
        self,
        plan: StepPlan,
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
        plan.chunks.append(StepChunk(sequence, start, count, samples, load, save))
        self._budget -= count
        if samples and count == 1 and not admission and sequence.length > sequence.prompt_tokens:
            plan.decode_seqs += 1
            plan.decode_context += end
        else:
            plan.new_tokens += count

    def _allocate_up_to(self, sequence: EngineSequence, end: int) -> bool:
        """Allocate blocks for positions up to `end`, preempting from the last running sequence.
        Returns False if `sequence` itself was preempted."""
        need = -(-end // self._block_tokens) - len(sequence.blocks)
        while need > self.pool.available:
            victim = self.running.pop()
            self._preempt(victim)
            self._batch_changed = True
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
            parent_block = blocks[index - 1] if index else None
            parent_hash = hashes[index - 1] if index else content.root
            fingerprint = content.fingerprint(index) if pool.prefix_caching else 0
            blocks[index] = pool.register(
                blocks[index], parent_block, parent_hash, hashes[index], fingerprint
            )
        sequence.registered_blocks = full
