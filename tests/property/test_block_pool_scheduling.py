"""Step scheduler and block pool under random requests, cancellations, failing steps and clearing.

A runner that stores blocks as token ids proves that every block that a plan loads has the right
content. Some prompts come from sources, which end at any point, and some are computed for others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.invariants import check_pool

from dynamo.core.values import BlocksCleared, BlocksStored, EngineInfo, KvEvent
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.eviction import make_eviction_policy
from dynamo.inference.kv_source import Arrival, KvSource
from dynamo.inference.model_runner import StepPlan
from dynamo.inference.sequence import EngineSequence, TokenContent
from dynamo.inference.step_scheduler import HitsFrom, StepScheduler

BLOCK_TOKENS = 4


def next_token(tokens: array[int]) -> int:
    """Return the next token of a context. Every token before it matters."""
    return (sum(token * (index + 1) for index, token in enumerate(tokens)) * 31 + 7) % 5


class ManualSource(KvSource):
    """A source that the test itself plays."""

    async def fill(self, arrival: Arrival) -> None:
        raise NotImplementedError


class StoringRunner:
    """A runner whose blocks hold token ids. Areas hold the ids that were loaded or computed."""

    def __init__(self, stores: bool) -> None:
        self.stores = stores
        self.blocks: dict[int, array[int]] = {}
        self.areas: dict[EngineSequence, array[int]] = {}

    def step(self, plan: StepPlan) -> list[int]:
        for sequence in plan.released:
            self.areas.pop(sequence, None)
        sampled = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence not in self.areas:
                self.areas[sequence] = self._load(chunk.load_block_ids, sequence, chunk.start)
            area = self.areas[sequence]
            assert chunk.count > 0
            assert len(area) == chunk.start, "the chunk continues where the last one ended"
            area.extend(sequence.tokens[chunk.start : chunk.start + chunk.count])
            assert chunk.samples == (len(area) == len(sequence.tokens))
            if chunk.samples:
                sampled.append(next_token(area))
        for chunk in plan.chunks:
            area = self.areas[chunk.sequence]
            for index, block in chunk.save_blocks:
                saved = area[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                assert len(saved) == BLOCK_TOKENS or chunk.sequence.prefill_only
                self.blocks[block] = saved
        return sampled

    def _load(self, load: tuple[int, ...], sequence: EngineSequence, start: int) -> array[int]:
        assert len(load) == -(-start // BLOCK_TOKENS)
        if not self.stores:
            return sequence.tokens[:start]
        area = array("I")
        for block in load:
            area.extend(self.blocks[block])
        assert area[:start] == sequence.tokens[:start], "what was hit is not what was stored"
        return area[:start]


class KvEventView:
    """The cache as a listener knows it from events alone."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksCleared):
                self.parents.clear()
            elif isinstance(event, BlocksStored):
                parent = event.parent
                for block_hash in event.hashes:
                    assert block_hash not in self.parents, "stored twice"
                    self.parents[block_hash] = parent
                    parent = block_hash
            else:
                for block_hash in event.hashes:
                    del self.parents[block_hash]

    def check_chains(self) -> None:
        for parent in self.parents.values():
            assert parent == 0 or parent in self.parents, "a block without its parent"


class SchedulerHarness:
    """A scheduler with its pool, a storing runner, a listener and the sequences that are not
    complete."""

    def __init__(
        self, blocks: int, budget: int, seqs: int, hits_from: HitsFrom, eviction: str, caching: bool
    ) -> None:
        self.pool = BlockPool(
            blocks, BLOCK_TOKENS, eviction=make_eviction_policy(eviction), prefix_caching=caching
        )
        self.limits = EngineInfo(
            "test", self.pool.block_tokens, self.pool.num_blocks, 40, seqs, budget
        )
        self.scheduler = StepScheduler(self.pool, self.limits, hits_from=hits_from)
        self.runner = StoringRunner(stores=hits_from == "computed")
        self.view = KvEventView()
        self.live: list[EngineSequence] = []
        self.held: list[EngineSequence] = []

    def add(self, prompt: list[int], max_tokens: int, priority: int, way: str) -> None:
        content = TokenContent(array("I", prompt).tobytes(), BLOCK_TOKENS)
        sequence = EngineSequence(content, len(prompt), max_tokens, priority=priority)
        sequence.sources = (ManualSource(),) if way == "from a source" else ()
        sequence.prefill_only = way == "for another worker"
        if len(prompt) < self.scheduler.context_tokens:
            self.scheduler.add(sequence)
            self.live.append(sequence)

    def cancel(self, number: int) -> None:
        if self.live:
            self.scheduler.remove(self.live.pop(number % len(self.live)))

    def arrive(self, number: int) -> None:
        """Let a sequence go on to arrive: a block, the first token, or the end of the arrival. The
        source of a preempted one ends."""
        queue = self.scheduler.arriving
        arriving = queue.preempted or [s for s in queue.sequences if s.sources]
        if not arriving:
            return
        sequence = arriving[number % len(arriving)]
        arrived, prompt = sequence.computed_tokens, sequence.prompt_tokens
        ends = sequence.ended or sequence in queue.preempted or number % 4 == 0
        if ends or (arrived == prompt and (sequence.length > prompt or number % 4 == 3)):
            self.scheduler.end_arrival(sequence)
        elif arrived == prompt or (number % 4 == 1 and sequence.length == prompt):
            self.scheduler.append_first_token(sequence, next_token(sequence.tokens))
            self._end_complete()
        else:
            end = min(arrived + BLOCK_TOKENS, prompt)
            block = sequence.blocks[arrived // BLOCK_TOKENS]
            self.runner.blocks[block.id] = sequence.tokens[arrived:end]
            self.scheduler.on_arrived(sequence, end)

    def release(self) -> None:
        """End the oldest call for which blocks are held, after its blocks were read."""
        if self.held:
            sequence = self.held.pop(0)
            stored = array("I")
            for block in sequence.blocks:
                stored.extend(self.runner.blocks[block.id] if self.runner.stores else ())
            if self.runner.stores:
                assert stored[: sequence.prompt_tokens] == sequence.tokens[:-1]
            self.scheduler.remove(sequence)

    def clear(self) -> None:
        self.pool.clear()

    def fail(self) -> None:
        """Run a step that raises after its runner has finished. None of its work counts."""
        plan = self._schedule()
        if plan is None:
            return
        self.runner.step(plan)
        for chunk in plan.chunks:
            self.scheduler.remove(chunk.sequence)
            self.live.remove(chunk.sequence)

    def _schedule(self) -> StepPlan | None:
        """Plan a step. No sequence is preempted while one of a lower priority arrives."""
        before = [(sequence, sequence.preemptions) for sequence in self.scheduler.running]
        plan = self.scheduler.schedule()
        arriving = self.scheduler.arriving
        arriving.new.clear()
        for sequence, preemptions in before:
            if sequence.preemptions > preemptions:
                lowest = min((other.priority for other in arriving.sequences), default=9)
                assert sequence.priority <= lowest
        return plan

    def step(self, within: Callable[[], None] = lambda: None) -> bool:
        plan = self._schedule()
        if plan is None:
            outside = bool(self.scheduler.arriving.sequences or self.held)
            assert outside or not self.live, "requests wait and nothing is done"
            self.arrive(len(self.scheduler.arriving) * 4 + 2)
            self.release()
            return outside
        assert sum(chunk.count for chunk in plan.chunks) <= self.limits.max_num_batched_tokens
        assert plan.new_tokens + plan.decode_seqs == sum(chunk.count for chunk in plan.chunks)
        in_batch = len(self.scheduler.running) + len(self.scheduler.arriving)
        assert in_batch <= self.limits.max_num_seqs
        tokens = self.runner.step(plan)
        within()
        self.scheduler.complete(plan, tokens)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.prefill_only and chunk.samples and not sequence.ended:
                self.scheduler.hold(sequence)
                self.live.remove(sequence)
                self.held.append(sequence)
        self._end_complete()
        return True

    def _end_complete(self) -> None:
        for sequence in [
            sequence for sequence in self.live if sequence.length >= sequence.max_length
        ]:
            self.scheduler.remove(sequence)
            self.live.remove(sequence)
            check_answer(sequence)

    def act(self, kind: str, number: int) -> None:
        """Do what `events` names."""
        actions = {
            "cancel": partial(self.cancel, number),
            "arrive": partial(self.arrive, number),
            "clear": self.clear,
            "fail": self.fail,
            "release": self.release,
            "step": self.step,
            "step_arriving": partial(self.step, partial(self.arrive, number)),
            "step_cancelling": partial(self.step, partial(self.cancel, number)),
            "step_clearing": partial(self.step, self.clear),
        }
        actions[kind]()

    def check(self) -> None:
        check_pool(self.pool)
        self.view.apply(self.pool.take_events())
        dump = KvEventView()
        dump.apply(self.pool.dump_events())
        assert dump.parents == self.view.parents
        self.view.check_chains()
        assert self.scheduler._to_load <= set(self.scheduler.running)
        sequences = [*self.scheduler.running, *self.scheduler.arriving.sequences, *self.held]
        used = [block for sequence in sequences for block in sequence.blocks]
        assert len(set(used)) == self.pool.active
        assert all(block.ref_count == used.count(block) for block in used)


def check_answer(sequence: EngineSequence) -> None:
    expected = sequence.tokens[: sequence.prompt_tokens]
    while len(expected) < sequence.max_length:
        expected.append(next_token(expected))
    assert sequence.tokens == expected


prompts = st.builds(
    lambda stem, length, tail: [stem] * length + tail,
    st.integers(0, 2),
    st.integers(1, 28),
    st.lists(st.integers(0, 1), max_size=3),
)
events = st.one_of(
    st.just(("step", 0)),
    st.just(("step", 0)),
    st.tuples(st.sampled_from(["step_cancelling", "cancel"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["step_arriving", "arrive", "arrive"]), st.integers(0, 99)),
    st.tuples(st.just("arrive"), st.integers(0, 99)),
    st.tuples(st.sampled_from(["step_clearing", "clear", "fail", "release"]), st.just(0)),
)
ways = st.sampled_from(["", "", "from a source", "for another worker"])
bursts = st.lists(
    st.tuples(
        st.lists(
            st.tuples(prompts, st.integers(1, 20), st.integers(0, 1), ways), min_size=1, max_size=3
        ),
        st.lists(events, max_size=8),
    ),
    min_size=6,
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(
    bursts,
    st.integers(4, 16),
    st.one_of(st.integers(1, 6), st.integers(7, 40)),
    st.integers(1, 5),
    st.sampled_from(["computed", "scheduled"]),
    st.sampled_from(["lru", "reuse"]),
    st.sampled_from([True, True, True, False]),
)
def test_no_block_is_lost_and_all_requests_complete(
    steps_todo: list[tuple],
    blocks: int,
    budget: int,
    seqs: int,
    hits_from: HitsFrom,
    eviction: str,
    caching: bool,
) -> None:
    harness = SchedulerHarness(blocks, budget, seqs, hits_from, eviction, caching)
    for arrivals, actions in steps_todo:
        for arrival in arrivals:
            harness.add(*arrival)
        for kind, number in actions:
            harness.act(kind, number)
            harness.check()
    steps = 0
    while harness.step():
        harness.check()
        steps += 1
        assert steps < 20_000, "no end in sight"
    assert harness.pool.active == 0
    assert harness.pool.available == blocks
