"""`TierSource`: loads the blocks of a sequence from the tiers that have them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from dynamo.core.errors import TransferFailed
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.load_choice import count_useful_runs
from dynamo.inference.kv_source import Arrival, ArrivalCounters, KvSource
from dynamo.inference.sequence import EngineSequence
from dynamo.inference.tiers.tier import KvTier, TierBlock

DEADLINE_FACTOR = 4.0
MIN_DEADLINE_S = 2.0


class LoadRun:
    """Consecutive blocks of a sequence in one tier."""

    __slots__ = ("blocks", "first", "tier")

    def __init__(self, tier: KvTier, first: int, blocks: int) -> None:
        self.tier = tier
        self.first = first
        self.blocks = blocks


class TierSource(KvSource):
    """Loads runs of blocks of one sequence, one after the other."""

    def __init__(
        self, counters: ArrivalCounters, sequence: EngineSequence, runs: Sequence[LoadRun]
    ) -> None:
        self.counters = counters
        self.name = runs[0].tier.name
        self._sequence = sequence
        self._runs = runs
        self.loads = range(runs[0].first, runs[-1].first + runs[-1].blocks)

    async def fill(self, arrival: Arrival) -> None:
        for run in self._runs:
            await load_within_deadline(run, self._load(run, arrival))

    async def _load(self, run: LoadRun, arrival: Arrival) -> None:
        sequence, first = self._sequence, run.first
        at = first - arrival.first_block
        slots = arrival.block_ids[at : at + run.blocks]
        loaded = 0

        def on_loaded(count: int) -> None:
            nonlocal loaded
            tokens = (first + count) * arrival.block_tokens
            arrival.on_arrived(tokens)
            if not sequence.preemptions:
                sequence.cached_tokens = min(tokens, sequence.prompt_tokens)
            for block in sequence.blocks[first + loaded : first + count]:
                block.hits = max(block.hits, 1)
            loaded = count

        await run.tier.load(describe_blocks(sequence, first, slots), on_loaded)


def describe_blocks(sequence: EngineSequence, first: int, slots: Sequence[int]) -> list[TierBlock]:
    """Return the blocks of a sequence from `first` on, as a tier loads them into `slots`."""
    content, blocks = sequence.content, []
    for index, slot in enumerate(slots, first):
        parent = content.hashes[index - 1] if index else content.root
        tokens = content.fingerprint(index).to_bytes(IDENTITY_BYTES)
        blocks.append(TierBlock(content.hashes[index], parent, slot, tokens=tokens))
    return blocks


async def load_within_deadline(run: LoadRun, load: Awaitable[None]) -> None:
    """Wait for the load of a run. Raises `TransferFailed` if it takes much longer than
    predicted."""
    tier, now = run.tier, asyncio.get_running_loop().time
    started_s = now()
    deadline_s = MIN_DEADLINE_S + DEADLINE_FACTOR * tier.predict_load_s(run.blocks)
    try:
        async with asyncio.timeout(deadline_s):
            await load
    except TimeoutError:
        text = f"the tier {tier.name} did not load {run.blocks} blocks in {deadline_s:.1f} s"
        raise TransferFailed.of("timeout", text) from None
    finally:
        tier.counters.load_s += now() - started_s


def find_runs(tiers: Iterable[KvTier], hashes: Sequence[int], first: int) -> list[LoadRun]:
    """Return where the blocks from `first` on lie, each in the first of `tiers` that has it, up to
    the first block that none has."""
    readable = [tier for tier in tiers if tier.is_readable]
    runs: list[LoadRun] = []
    for index in range(first, len(hashes)):
        block_hash = hashes[index]
        for tier in readable:
            if tier.holds(block_hash):
                break
        else:
            break
        if runs and runs[-1].tier is tier:
            runs[-1].blocks += 1
        else:
            runs.append(LoadRun(tier, index, 1))
    return runs


def useful_runs(runs: Sequence[LoadRun], compute_s: float, hidden_s: float) -> Sequence[LoadRun]:
    """Return the first runs whose load saves the most time against computing, which takes
    `compute_s` a block. The first `hidden_s` of a load cost nothing."""
    load_s, ready = 0.0, []
    for run in runs:
        load_s += run.tier.predict_load_s(run.blocks)
        ready.append((run.blocks, load_s))
    return runs[: count_useful_runs(ready, compute_s, hidden_s)]
