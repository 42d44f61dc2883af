"""What a replay promises whatever the policy: all are answered once, and the same seed gives the
same."""

from __future__ import annotations

import asyncio

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


def told(outcome):
    """All that a replay says, but how long it took."""
    result, log = outcome
    return msgspec.structs.replace(result, wall_s=0, cpu_s=0), list(log.placings)


@pytest.mark.parametrize(("mode", "policy"), ROUTINGS)
@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_every_request_is_answered_once(replay, mode, policy, eviction):
    conversations = chats(60)
    turns = {turn.row: turn for one in conversations for turn in one.requests}
    result, log = replay(conversations, mode, policy, workers=cluster(eviction=eviction))
    assert result.requests == result.completed == len(turns)
    assert sorted(placing.request for placing in log.placings) == sorted(turns)
    assert log.output_tokens == sum(turn.output_tokens for turn in turns.values())
    assert log.prompt_tokens == sum(turn.prompt_tokens for turn in turns.values())
    assert not log.under_way
    assert not result.errors
    assert sum(result.requests_per_worker) == len(turns)


def test_also_where_memory_is_so_scarce_that_requests_are_preempted(replay):
    conversations = chats(80, per_s=20, answer=300)
    result, log = replay(conversations, workers=cluster(2, num_blocks=96))
    assert result.preemptions > 0
    assert result.evictions > 0
    assert result.completed == sum(len(one.requests) for one in conversations)
    assert log.output_tokens == sum(t.output_tokens for one in conversations for t in one.requests)


def test_a_prompt_that_no_worker_can_hold_is_told(replay):
    result, _ = replay(chats(10), workers=cluster(2, num_blocks=8))
    assert result.completed < result.requests
    assert set(result.errors) == {"context_length_exceeded"}
    assert sum(result.errors.values()) == result.requests - result.completed


@pytest.mark.parametrize("mode", ["random", "kv"])
def test_the_same_seed_does_the_same(replay, mode):
    first = told(replay(chats(50), mode, seed=3))
    again = told(replay(chats(50), mode, seed=3))
    assert first == again
    assert told(replay(chats(50), mode, seed=4))[1] != first[1]


def test_turns_wait_for_the_answer_before(replay):
    conversations = chats(30)
    _, log = replay(conversations)
    placed = {placing.request: placing.placed_ms / 1e3 for placing in log.placings}
    for one in conversations:
        for before, after in zip(one.requests, one.requests[1:], strict=False):
            assert placed[after.row] > placed[before.row] + after.delay_s


def test_no_request_comes_early(replay):
    conversations = chats(30)
    _, log = replay(conversations, "round_robin")
    placed = {placing.request: placing.placed_ms / 1e3 for placing in log.placings}
    for one in conversations:
        assert placed[one.requests[0].row] == pytest.approx(one.start_s, abs=1e-9)


class Never(Policy):
    """Chooses nobody; `ticks`: looks again every second, for ever."""

    def __init__(self, clock: Clock, ticks: bool) -> None:
        self._clock = clock
        self._ticks = ticks

    async def choose(self, request, context, tried):
        while self._ticks:
            await self._clock.sleep(1)
        await asyncio.Event().wait()


@pytest.mark.parametrize("ticks", [False, True])
def test_a_policy_that_never_chooses_is_a_deadlock_and_told(replay, monkeypatch, ticks):
    async def never(settings, client, events, clock, **_):
        return Never(clock, ticks)

    monkeypatch.setattr(cluster_module, "open_policy", never)
    with pytest.raises(Deadlock, match="wait"):
        replay(chats(3))
