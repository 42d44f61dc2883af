"""Plans the steps of an engine: continuous batching with chunked prefill under a token budget.
A plan takes the running sequences first, by priority and then in the order of admission. Waiting
sequences are admitted while tokens, batch slots and blocks are left. If blocks run out, the last
running sequence is preempted: its blocks are released and it is computed again later, starting with
the part that is still cached.

A sequence with `sources` is admitted as an arriving one: it holds a batch slot and the blocks of
its whole prompt, and no step computes it until `end_arrival`. Then it runs, computed as far as its
blocks have arrived. A sequence with the same prompt as an arriving one waits for its end, and takes
the blocks from the prefix cache. So does one whose next block another one loads from a tier. If a
running sequence of a higher priority needs blocks, the last arriving one is preempted: its source
is stopped, and the running sequence pauses until then.

The scheduler uses no clock and no loop, and reads no token ids. Source: vLLM's V1, nano-vllm.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest, ProtocolError
from dynamo.core.values import EngineInfo
from dynamo.inference.arrival_queue import ArrivalQueue, admission_order, running_order
from dynamo.inference.block import Block
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.engine_tiers import EngineTiers
from dynamo.inference.model_runner import StepChunk, StepPlan
from dynamo.inference.sequence import EngineSequence

MAX_MATCHED_BLOCKS = 32_768
"""So many cached blocks are matched in one step, since each costs a microsecond of the loop."""

HitsFrom = Literal["scheduled", "computed"]
"""When other sequences can reuse a full block: as soon as its step is planned (for engines without
real KV), or when the step that computes it has ended."""


class StepScheduler:
    """Owns the queues of one engine; `pool` owns the blocks. Of `limits` only the sizes of a batch,
    vocabulary and context count; the context limits prompt and output of a sequence together.
    `looks_ahead`: sequences get the block of their next position a step early, if one is free."""

    def __init__(
        self,
        pool: BlockPool,
        limits: EngineInfo,
        *,
        hits_from: HitsFrom = "computed",
        looks_ahead: bool = False,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.context_tokens = min(limits.context_tokens, pool.num_blocks * pool.block_tokens)
        self.running: list[EngineSequence] = []
        self.waiting: list[EngineSequence] = []
        self.arriving = ArrivalQueue(pool.block_tokens)
        self.tiers = EngineTiers()
        self.preemptions = 0
        self.changes: list[EngineSequence] = []  # admitted or preempted, for the engine to clear
        self._block_tokens = pool.block_tokens
        self._looks_ahead = looks_ahead
        self._registers_at_schedule = hits_from == "scheduled"
        self._saves_blocks = not self._registers_at_schedule and pool.prefix_caching
        self._released: list[EngineSequence] = []
        self._to_load: set[EngineSequence] = set()
        self._arrivals = 0
        self._had_work = False
        self._budget, self._batch_changed = 0, True

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
        a step computes the sequence. The result of that step is then ignored for it. An arriving
        sequence keeps its blocks until `end_arrival`, because its source may write into them."""
        if sequence.ended:
            return
        sequence.ended = True
        self._batch_changed = True
        if sequence in self.arriving.sequences:
            if sequence.sources:
                return
            self.arriving.remove_arrived(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        if sequence in self.running:
            self.running.remove(sequence)
        self._release_blocks(sequence)

    def has(self, sequence: EngineSequence) -> bool:
        """Whether the sequence runs, waits or arrives."""
        queues = (self.running, self.waiting, self.arriving.sequences)
        return any(sequence in queue for queue in queues)

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        self._batch_changed = False
        self._budget = self.limits.max_num_batched_tokens
        plan = StepPlan(back_to_back=self._had_work)
        if self.arriving.arrived:
            self._to_load.update(self.arriving.move_arrived(self.running))
        self._plan_running(plan)
        if self._to_load:
            self._add_loads(plan)
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

    def on_arrived(self, sequence: EngineSequence, tokens: int) -> None:
        """Record that the KV of the first `tokens` positions of an arriving sequence is there."""
        if sequence.ended:
            return
        sequence.computed_tokens = tokens
        if tokens // self._block_tokens > sequence.registered_blocks:
            self._register_full_blocks(sequence, tokens // self._block_tokens)
            if self.waiting:  # a sequence with these blocks needs fewer now
                self._batch_changed = True

    def append_first_token(self, sequence: EngineSequence, token: int) -> None:
        """Add the first token of the answer of an arriving sequence, which a peer has sampled.
        Raises `ProtocolError` if the vocabulary lacks it: such a token would end the engine."""
        if 0 < self.limits.vocab_size <= token:
            raise ProtocolError(f"a prefill worker sent token {token}, which is in no vocabulary")
        sequence.content.append_token(token)
        sequence.length += 1

    def end_arrival(self, sequence: EngineSequence) -> None:
        """Let an arriving sequence run: its source has ended and writes no more. The blocks of a
        sequence that was removed meanwhile are released. A preempted one waits; its source begins
        again later, unless the first token of the answer is there already."""
        self._batch_changed = True
        if self.arriving.end(sequence):
            return
        if sequence.ended:
            self._release_blocks(sequence)
        else:
            self._preempt(sequence)

    def hold(self, sequence: EngineSequence) -> None:
        """Take a running sequence out of the batch. Its blocks stay referenced until `remove`."""
        self.running.remove(sequence)
        self._released.append(sequence)
        self._batch_changed = True

    def steady_steps(self, plan: StepPlan) -> int:
        """Count the steps after the completed `plan` that would only decode the same batch.

        In each of them every running sequence decodes one token, none ends and none waits for
        blocks. Where another sequence could be admitted or a tier sees each step, `plan` must have
        done that and no more. Then those that wait cannot be admitted: blocks only get fewer.
        """
        running = self.running
        seen = self.waiting or self.arriving.arrived or self.tiers.can_load
        if seen and (self._batch_changed or plan.decode_seqs != len(plan.chunks)):
            return 0
        sampled = {chunk.sequence for chunk in plan.chunks if chunk.samples}
        if not running or not all(each in sampled and not each.stop_ids for each in running):
            return 0
        steps = min(sequence.max_length - sequence.length for sequence in running) - 1
        if self._blocks_needed(steps) <= self.pool.available:
            return steps
        return bisect_right(range(steps), self.pool.available, key=self._blocks_needed) - 1

    def advance(
        self, steps: int, sampled: Sequence[Sequence[int]], *, next_planned: bool = False
    ) -> None:
        """Apply `steps` steady steps at once. `sampled` has the tokens of each running sequence.
        `next_planned`: another steady step is being computed; tiers see its blocks, too."""
        block_tokens = self._block_tokens
        ahead = int(next_planned)
        for sequence, tokens in zip(self.running, sampled, strict=True):
            sequence.computed_tokens = computed = sequence.computed_tokens + steps
            sequence.length += steps
            need = -(-(computed + ahead) // block_tokens) - len(sequence.blocks)
            if need > 0:
                sequence.blocks += self.pool.allocate(need)
            sequence.content.append_tokens(tokens)
            if (computed + ahead) // block_tokens > sequence.registered_blocks:
                self._register_full_blocks(sequence, (computed + ahead) // block_tokens)

    def _blocks_needed(self, steps: int) -> int:
        """Count the blocks needed for `steps` more tokens of every running sequence."""
        block_tokens = self._block_tokens
        return sum(
            max(0, -(-(sequence.computed_tokens + steps) // block_tokens) - len(sequence.blocks))
            for sequence in self.running
        )

    def prefill_tokens(self) -> int:
        """Count the prompt tokens that this engine still has to compute."""
        tokens = sum(sequence.length for sequence in self.waiting if not sequence.sources)
        for sequence in self.running:
            uncomputed = sequence.length - sequence.computed_tokens
            tokens += uncomputed if uncomputed > 1 else 0
        return tokens

    def _add_loads(self, plan: StepPlan) -> None:
        """Let the first chunks of arrived sequences load the blocks before them."""
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if sequence in self._to_load:
                self._to_load.remove(sequence)
                blocks = sequence.blocks[: -(-chunk.start // self._block_tokens)]
                load = tuple(block.id for block in blocks)
                plan.chunks[index] = replace(chunk, load_block_ids=load)

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
            if allocated or self._allocate_up_to(sequence, end):
                self._add_chunk(plan, sequence, start, count, ())
                if self._looks_ahead and end == len(sequence.blocks) * block_tokens:
                    sequence.blocks += self.pool.allocate(min(1, self.pool.free))
            elif not self.arriving.preempted:
                return
            index += 1

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit sequences while tokens, batch slots and blocks are left. A sequence is admitted
        only if all its known tokens fit into free blocks now. Otherwise it would soon be
        preempted."""
        pool, waiting = self.pool, self.waiting
        matched = index = 0
        while (
            index < len(waiting)
            and len(self.running) + len(self.arriving) < self.limits.max_num_seqs
        ):
            sequence = waiting[index]
            if self.tiers.is_prefetching(sequence):
                index += 1
                continue
            can_arrive = sequence.sources or self.tiers.can_load
            if matched > MAX_MATCHED_BLOCKS or not (self._budget or can_arrive):
                return
            full = (sequence.length - 1) // self._block_tokens
            sequence.content.ensure_hashes(full)
            content, hits = sequence.content, []
            if sequence.sources and self.arriving.has_prompt(sequence, full):
                index += 1
                continue
            if pool.prefix_caching and not sequence.wants_prompt_logprobs:
                hits = pool.match(content.hashes[:full], content.fingerprint)
            have = len(hits)
            if have < full and self.arriving.is_loading(content.hashes[have]):
                index += 1
                continue
            need = -(-sequence.length // self._block_tokens) - len(hits)
            if need > pool.available - pool.count_unreferenced(hits):
                return
            if 0 < full == len(hits):
                sequence.sources = ()
            elif not sequence.wants_prompt_logprobs:
                sequence.sources = self.tiers.sources_for(sequence, len(hits), full)
            if not (sequence.sources or self._budget):
                return
            del waiting[index]
            if sequence.sources:
                self._admit_arrival(sequence, hits, need)
            else:
                self._admit(plan, sequence, hits)
            matched += len(hits)

    def _admit_arrival(self, sequence: EngineSequence, hits: list[Block], need: int) -> None:
        self._take_blocks(sequence, hits, need)
        self.arriving.add(sequence, prefix_caching=self.pool.prefix_caching)

    def _take_blocks(self, sequence: EngineSequence, hits: list[Block], need: int) -> None:
        """Give `sequence` its cached blocks and `need` more."""
        self.pool.reference(hits)
        sequence.blocks = hits + self.pool.allocate(need)
        sequence.registered_blocks = len(hits)
        sequence.computed_tokens = start = len(hits) * self._block_tokens
        self.changes.append(sequence)
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached_tokens = start

    def _admit(self, plan: StepPlan, sequence: EngineSequence, hits: list[Block]) -> None:
        start = len(hits) * self._block_tokens
        count = min(sequence.length - start, self._budget)
        end = sequence.length if sequence.prefill_only else start + count
        self._take_blocks(sequence, hits, -(-end // self._block_tokens) - len(hits))
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
        if samples and count == 1 and not admission and sequence.length > sequence.prompt_tokens:
            plan.decode_seqs += 1
            plan.decode_context += end
        else:
            plan.new_tokens += count
            plan.attention += count * (start + count / 2)
            if sequence.prefill_only:
                first, blocks = sequence.registered_blocks, sequence.blocks
                last = -(-end // self._block_tokens) if samples else full
                save = tuple((at, blocks[at].id) for at in range(first, last))
        plan.chunks.append(StepChunk(sequence, start, count, samples, load, save, sequence.blocks))
        self._budget -= count

    def _allocate_up_to(self, sequence: EngineSequence, end: int) -> bool:
        """Allocate blocks for positions up to `end`, preempting from the last running sequence.
        Returns False if `sequence` itself was preempted, or has to pause until the source of a
        preempted arriving sequence has stopped."""
        need = -(-end // self._block_tokens) - len(sequence.blocks)
        while need > self.pool.available:
            self._batch_changed = True
            if self.arriving.preempted or self.arriving.preempt_below(self.running[-1].priority):
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(need)
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        self._release_blocks(sequence)
        self.preemptions += 1
        sequence.preemptions += 1
        self.changes.append(sequence)
        sequence.computed_tokens = sequence.registered_blocks = 0
        insort(self.waiting, sequence, key=admission_order)

    def _release_blocks(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._to_load.discard(sequence)
        self._released.append(sequence)

    def _register_full_blocks(self, sequence: EngineSequence, full: int) -> None:
        self.pool.register_chain(
            sequence.content, sequence.blocks, sequence.registered_blocks, full
        )
        sequence.registered_blocks = full
