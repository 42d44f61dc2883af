"""Invariants of every replay: each request is answered once, and a seed determines the result."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest
from tests.simulation.conftest import chats, cluster

from dynamo.core.clock import Clock
from dynamo.core.plugins import ROUTER_COSTS
from dynamo.core.settings.schema_router import BASIC_MODES
from dynamo.core.virtual_time import Deadlock
from dynamo.operations.replay import cluster as cluster_module
from dynamo.scheduling.router import Policy

ROUTINGS = [(mode, "predicted") for mode in (*BASIC_MODES, "adaptive")]
ROUTINGS += [("kv", policy) for policy in ROUTER_COSTS.builtin]


def comparable(outcome):
    """Return a replay's result without its run time, and its placements."""
    result, log = outcome
    return msgspec.structs.replace(result, wall_s=0, cpu_s=0), list(log.placements)


@pytest.mark.parametrize(("mode", "policy"), ROUTINGS)
@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_every_request_is_answered_once(replay, mode, policy, eviction):
    conversations = chats(60)
    turns = {turn.row: turn for conversation in conversations for turn in conversation.requests}
    result, log = replay(conversations, mode, policy, workers=cluster(eviction=eviction))
    assert result.requests == result.completed == len(turns)
    assert sorted(placement.request for placement in log.placements) == sorted(turns)
    assert log.output_tokens == sum(turn.output_tokens for turn in turns.values())
    assert log.prompt_tokens == sum(turn.prompt_tokens for turn in turns.values())
    assert not log.in_flight
    assert not result.errors
    assert sum(result.requests_per_worker) == len(turns)


def test_every_request_is_answered_with_preemptions(replay):
    conversations = chats(80, per_s=20, answer=300)
    result, log = replay(conversations, workers=cluster(2, num_blocks=96))
    assert result.preemptions > 0
    assert result.evictions > 0
    assert result.completed == sum(len(conversation.requests) for conversation in conversations)
    assert log.output_tokens == sum(
        turn.output_tokens for conversation in conversations for turn in conversation.requests
    )


def test_a_prompt_that_fits_no_worker_is_an_error(replay):
    result, _ = replay(chats(10), workers=cluster(2, num_blocks=8))
    assert result.completed < result.requests
    assert set(result.errors) == {"context_length_exceeded"}
    assert sum(result.errors.values()) == result.requests - result.completed


@pytest.mark.parametrize("mode", ["random", "kv"])
def test_the_same_seed_gives_the_same_result(replay, mode):
    first = comparable(replay(chats(50), mode, seed=3))
    again = comparable(replay(chats(50), mode, seed=3))
    assert first == again
    assert comparable(replay(chats(50), mode, seed=4))[1] != first[1]


def test_a_turn_waits_for_the_answer_before(replay):
    conversations = chats(30)
    _, log = replay(conversations)
    placed = {placement.request: placement.placed_ms / 1e3 for placement in log.placements}
    for conversation in conversations:
        for before, after in pairwise(conversation.requests):
            assert placed[after.row] > placed[before.row] + after.delay_s


def test_first_requests_start_on_time(replay):
    conversations = chats(30)
    _, log = replay(conversations, "round_robin")
    placed = {placement.request: placement.placed_ms / 1e3 for placement in log.placements}
    for conversation in conversations:
        first = conversation.requests[0]
        assert placed[first.row] == pytest.approx(conversation.start_s, abs=1e-9)


class BlockingPolicy(Policy):
    """Never return a decision; with `ticks`, wake up every second."""

    def __init__(self, clock: Clock, ticks: bool) -> None:
        self._clock = clock
        self._ticks = ticks

    async def choose(self, request, context, tried):
        while self._ticks:
            await self._clock.sleep(1)
        await asyncio.Event().wait()


@pytest.mark.parametrize(("ticks", "message"), [(False, "wait"), (True, "without progress")])
def test_a_policy_that_never_chooses_raises_a_deadlock(replay, monkeypatch, ticks, message):
    async def open_blocking_policy(inputs):
        return BlockingPolicy(inputs.clock, ticks)

    monkeypatch.setattr(cluster_module, "open_policy", open_blocking_policy)
    with pytest.raises(Deadlock, match=message):
        replay(chats(3))
