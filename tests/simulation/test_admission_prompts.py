"""Admission where prompts take long: predicted times, by prompt length and rank."""

from __future__ import annotations

from random import Random

import pytest
from tests.simulation.admission_trial import BLOCK, open_trial

from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import Timing
from dynamo.core.values import ROLES_BY_NAME, EngineInfo
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers


def make_slow_workers(
    count: int, token_ms: float, *, ranks: int = 1, roles: tuple[str, ...] = ("both",)
) -> ReplayWorkers:
    """Return `count` workers of each role that take 10 ms a step and `token_ms` a prompt token."""
    groups = []
    for role in roles:
        info = EngineInfo("mock", BLOCK, 4096, 4096 * BLOCK, 64, 8192, roles=ROLES_BY_NAME[role])
        groups.append(ReplayGroup(count, info, Timing(10.0, token_ms)))
    transfer = 64e9 if len(roles) > 1 else None
    return ReplayWorkers(groups, "lru", ranks=ranks, transfer=transfer)


def count_overload(mode: str, workers: ReplayWorkers) -> tuple[int, int]:
    """Return how many of 149 prompts of 6,000 tokens are shed, and how many are late, at 15 a
    second: more than twice the capacity of four engines."""

    async def main(clock: VirtualClock) -> tuple[int, int]:
        limits = RouterSettings(ttft_slo=2.0, disaggregation=DisaggregationSettings(mode="always"))
        async with open_trial(clock, limits, workers, mode) as run:
            await run.offer_load(1.0, 10, Random(7), prompt=6_000)
            assert not run.rejected
            run.first_token_s.clear()
            await run.offer_load(15.0, 10, Random(3), prompt=6_000)
            late = sum(seconds > 2.0 for seconds in run.first_token_s.values())
            return len(run.rejected), late

    return run_in_virtual_time(main)


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
@pytest.mark.parametrize("mode", ["round_robin", "adaptive", "kv"])
def test_ranks_shed_as_many_as_workers_and_are_late_as_rarely(
    mode: str, roles: tuple[str, ...]
) -> None:
    shed, late = count_overload(mode, make_slow_workers(4, 0.1, roles=roles))
    assert shed > 50
    for count, ranks in ((2, 2), (1, 4)):
        ranked = make_slow_workers(count, 0.1, ranks=ranks, roles=roles)
        rank_shed, rank_late = count_overload(mode, ranked)
        assert rank_shed == pytest.approx(shed, rel=0.1)
        assert rank_late <= late + 10


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
@pytest.mark.parametrize(("token_ms", "shed"), [(0.3, 11), (0.02, 0)])
def test_short_prompts_promise_nothing_for_long_ones(mode: str, token_ms: float, shed: int) -> None:
    """Two workers take 10 ms and `token_ms` for each token of 6,000: 1.8 s, or 0.13 s. Idle workers
    try the first long prompts."""

    async def main(clock: VirtualClock) -> None:
        workers = make_slow_workers(2, token_ms)
        async with (
            open_trial(clock, RouterSettings(ttft_slo=2.0), workers, mode) as run,
            BackgroundTasks() as tasks,
        ):
            await run.offer_load(3.0, 20, Random(7), prompt=64)
            assert not run.rejected
            for _ in range(13):
                tasks.start(run.send_request(prompt=6_000))
                await clock.sleep(0.1)
            await tasks.join()
            assert max(run.first_token_s.values()) < 2.0
            assert len(run.rejected) == shed

    run_in_virtual_time(main)


def test_the_cached_share_of_short_prompts_says_nothing_of_long_ones() -> None:
    """All short prompts are the same one, so that nearly all of it is cached."""

    async def main(clock: VirtualClock) -> None:
        workers = make_slow_workers(2, 0.3)
        async with (
            open_trial(clock, RouterSettings(ttft_slo=2.0), workers) as run,
            BackgroundTasks() as tasks,
        ):
            for _ in range(2):  # the time of a long prompt is learnt
                await run.send_request(prompt=6_000)
            for _ in range(60):
                await run.send_request(2, prompt=20 * BLOCK + 1, hashes=range(1, 21))
            await run.send_request(prompt=6_000)
            for _ in range(13):
                tasks.start(run.send_request(prompt=6_000))
                await clock.sleep(0.05)
            await tasks.join()
            assert max(run.first_token_s.values()) < 2.0

    run_in_virtual_time(main)
