"""Replays of synthetic conversations on small clusters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest

from dynamo.core.settings.schema_router import RouterSettings as RouterSettings
from dynamo.core.timing.model import DYNAMO_TIMING
from dynamo.core.values import EngineInfo
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.result import ReplayResult
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers

BLOCK = 64
Outcome = tuple[ReplayResult, ReplayLog]


def cluster(
    number: int = 4, *, num_blocks: int = 2048, eviction: str = "reuse", max_num_seqs: int = 64
) -> ReplayWorkers:
    """Return workers with Dynamo's default speed."""
    info = EngineInfo(
        engine="mock",
        block_tokens=BLOCK,
        num_blocks=num_blocks,
        context_tokens=num_blocks * BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
    )
    return ReplayWorkers([ReplayGroup(number, info, DYNAMO_TIMING)], eviction)


def chats(
    number: int, *, seed: int = 0, per_s: float = 4.0, answer: int = 60, shared: int = 4
) -> list[TraceConversation]:
    """Return conversations that share three common prefixes and grow with each turn."""
    chance, names, rows = Random(seed), itertools.count(1_000), itertools.count()
    conversations = []
    for _ in range(number):
        common = chance.randrange(3) * 100
        history = [common + at + 1 for at in range(shared)]
        turns = []
        for _ in range(chance.randrange(1, 5)):
            history += [next(names) for _ in range(chance.randrange(1, 12))]
            length = len(history) * BLOCK - chance.randrange(BLOCK)
            answers = chance.randrange(1, 2 * answer)
            turns.append(
                TraceRequest(
                    next(rows), length, answers, tuple(history), chance.random() * 3 * bool(turns)
                )
            )
        conversations.append(TraceConversation(chance.random() * number / per_s, turns))
    return sorted(conversations, key=lambda conversation: conversation.start_s)


def unique(
    number: int, per_s: float, blocks: int = 40, answer: int = 30
) -> Iterator[TraceConversation]:
    """Generate prompts without common blocks."""
    for row in range(number):
        yield TraceConversation(row / per_s, (TraceRequest(row, blocks * BLOCK, answer),))


def same(number: int, per_s: float, blocks: int, answer: int) -> Sequence[TraceConversation]:
    """Return prompts with a common prefix that differ in their last block."""
    hot = tuple(range(1, blocks))
    return [
        TraceConversation(
            row / per_s, (TraceRequest(row, blocks * BLOCK, answer, (*hot, 10_000 + row)),)
        )
        for row in range(number)
    ]


@pytest.fixture
def replay() -> Callable[..., Outcome]:
    """Return `replay(conversations, mode, policy, seed, workers)`, which returns an Outcome."""

    def run(
        conversations: Sequence[TraceConversation] | Iterator[TraceConversation],
        mode: str = "kv",
        policy: str = "predicted",
        *,
        seed: int = 0,
        workers: ReplayWorkers | None = None,
    ) -> Outcome:
        routing = RouterSettings(mode=mode, policy=policy)
        plan = ReplayPlan("made up", workers or cluster(), routing, BLOCK, seed)
        return Replay(plan).run(conversations)

    return run
