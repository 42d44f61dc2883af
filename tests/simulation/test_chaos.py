"""Chaos runs: minutes of simulated time with far more faults than in reality."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
from tests.simulation.chaos import ChaosResult, ChaosScenario, run_chaos
from tests.simulation.chaos.faults import FaultSchedule

from dynamo.communication.transfer import SlotRead
from dynamo.communication.transfer.memory import MemoryPeer
from dynamo.core.virtual_time import VirtualEventLoop
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.load_publisher import CoreWait
from dynamo.inference.tiers.copies import TimedCopies
from dynamo.operations.replay.workers import SimulatedTier
from dynamo.scheduling import migration
from dynamo.scheduling.index.kv_index import KvIndex

BAD = ChaosScenario(
    hours=0.06,
    workers=12,
    rate=4.0,
    num_blocks=256,
    faults=FaultSchedule(120.0, 60.0),
    deadline_s=20.0,
    disconnect_rate=0.5,
)


RARE = {"faults": FaultSchedule(60.0, 30.0)}
BUSY = {
    "workers": 9,
    "rate": 8.0,
    "prompt_tokens": 3_072,
    "num_blocks": 2_048,
    "faults": FaultSchedule(30.0, 15.0),
}
"""Workers without answers would compute their own prompts in mode flexible."""


def run_bad_day(**changes: Any) -> ChaosResult:
    return run_chaos(msgspec.structs.replace(BAD, **changes))


@pytest.mark.parametrize("seed", [1, 2])
def test_all_requests_are_answered_correctly_without_leaks(seed: int) -> None:
    result = run_bad_day(seed=seed)
    assert result.correct == result.requests > 700, result.failure_messages
    assert not result.failed
    assert not result.leaks
    assert result.crashes > 10
    assert result.partitioned_workers > 10
    assert result.counters["dynamo_workers_frozen_total"] > 0
    assert result.counters['dynamo_migrations_total{reason="worker_failed"}'] > 0


@pytest.mark.parametrize("mode", ["round_robin", "adaptive"])
def test_other_modes_answer_correctly_without_leaks(mode: str) -> None:
    result = run_bad_day(mode=mode, hours=0.03)
    assert result.correct == result.requests > 300, result.failure_messages
    assert not result.leaks


@pytest.mark.parametrize(
    ("mode", "disaggregation", "prefill_workers", "load"),
    [
        ("kv", "always", 4, RARE),
        ("round_robin", "always", 1, RARE),
        ("kv", "flexible", 0, BUSY),
    ],
)
def test_prompts_computed_elsewhere_are_answered_correctly_without_leaks(
    mode: str, disaggregation: str, prefill_workers: int, load: dict[str, Any]
) -> None:
    """Prefill and decode workers crash and are cut off at every stage of a prompt."""
    result = run_bad_day(
        mode=mode,
        disaggregation=disaggregation,
        prefill_workers=prefill_workers,
        hours=0.03,
        seed=2,
        **load,
    )
    assert result.correct == result.requests > 300, result.failure_messages
    assert not result.failed
    assert not result.leaks
    assert result.remote_prefills > 200
    assert sum(result.prefill_fallbacks.values()) > 10


TIERS = (
    SimulatedTier("host", 200, 2e4),
    SimulatedTier("disk", 400, 1e4),
    SimulatedTier("shared", 2_000, 2e4),
)
"""Blocks are digests of 8 bytes: 64 of them take 26 to 51 ms."""


@pytest.mark.parametrize(
    ("disaggregation", "prefill_workers", "num_blocks"), [("off", 0, 80), ("always", 4, 140)]
)
def test_blocks_in_tiers_are_answered_correctly_without_leaks(
    disaggregation: str, prefill_workers: int, num_blocks: int
) -> None:
    """Loads and stores fail half way, and workers crash during both."""
    result = run_bad_day(
        hours=0.03,
        rate=3.0,
        num_blocks=num_blocks,
        tiers=TIERS,
        tier_fault_share=0.1,
        disaggregation=disaggregation,
        prefill_workers=prefill_workers,
        faults=FaultSchedule(60.0, 30.0),
    )
    assert result.correct == result.requests > 200, result.failure_messages
    assert not result.failed
    assert not result.leaks
    assert all(result.tier_loads[tier.name] > 50 for tier in TIERS), result.tier_loads


def test_a_wrong_block_from_a_tier_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TimedCopies.store

    async def store_wrongly(self: TimedCopies, pairs: Sequence[tuple[int, int]]) -> None:
        await real(self, pairs)
        self._contents[pairs[0][1]] = bytes(8)

    monkeypatch.setattr(TimedCopies, "store", store_wrongly)
    result = run_bad_day(hours=0.01, num_blocks=80, tiers=TIERS, faults=FaultSchedule(0.0, 0.0))
    assert result.correct < result.requests
    assert result.failed["altered"] > 0


def test_a_wrong_block_from_a_prefill_worker_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryPeer._copy

    async def copy_wrongly(self: MemoryPeer, reads: Sequence[SlotRead]) -> None:
        await real(self, reads)
        self._region.slot(reads[0].target)[0] ^= 1

    monkeypatch.setattr(MemoryPeer, "_copy", copy_wrongly)
    result = run_bad_day(
        hours=0.005, prefill_workers=4, disaggregation="always", faults=FaultSchedule(0.0, 0.0)
    )
    assert result.correct < result.requests
    assert result.failed["altered"] > 0


def test_routers_recover_from_lost_events() -> None:
    """Two frontends synchronise; their own events are lost too."""
    faults = FaultSchedule(240.0, 90.0, (5.0, 20.0), event_loss_every_s=20.0)
    result = run_bad_day(frontends=2, faults=faults)
    assert result.correct == result.requests > 700, result.failure_messages
    assert not result.leaks


@pytest.mark.parametrize("scenario", [{}, {"disaggregation": "flexible", "seed": 2, **BUSY}])
def test_the_same_seed_gives_the_same_result(
    scenario: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither addresses of objects nor waits for a core of this machine decide anything."""

    schedule: list[tuple[float, str]] = []
    real = VirtualEventLoop.call_soon

    def call_soon(loop: VirtualEventLoop, callback: Any, *args: Any, **options: Any) -> Any:
        owner = getattr(callback, "__self__", None)
        work = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
        schedule.append((loop.time(), getattr(work, "__qualname__", "")))
        return real(loop, callback, *args, **options)

    def run_once() -> tuple[ChaosResult, int]:
        schedule.clear()
        result = run_bad_day(hours=0.03, **scenario)
        comparable = msgspec.structs.replace(result, wall_s=0.0, cpu_s=0.0, resident_mb=())
        assert len(schedule) > 10_000
        return comparable, hash(tuple(schedule))

    monkeypatch.setattr(VirtualEventLoop, "call_soon", call_soon)
    first = run_once()
    waits = count()
    monkeypatch.setattr(CoreWait, "measure", lambda _: next(waits) / 100)
    assert run_once() == first


def test_a_run_without_faults_has_no_stalls() -> None:
    result = run_bad_day(hours=0.03, faults=FaultSchedule(0.0, 0.0))
    assert result.correct == result.requests
    assert result.stalled == result.crashes == result.partitions == 0
    assert not result.counters


def test_a_token_lost_in_a_migration_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = migration.resume_request
    monkeypatch.setattr(migration, "resume_request", lambda request, ids: real(request, ids[:-1]))
    result = run_bad_day(seed=1, disconnect_rate=0.0)
    assert result.correct < result.requests
    assert set(result.failed) <= {"altered", "lost or doubled", "ended wrongly"}


def test_blocks_that_are_not_released_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real, withheld = BlockPool.release, []

    def release(self: BlockPool, blocks: list[Any]) -> None:
        if not withheld:
            withheld.append(blocks.pop())
        real(self, blocks)

    monkeypatch.setattr(BlockPool, "release", release)
    result = run_bad_day(hours=0.01, faults=FaultSchedule(0.0, 0.0))
    assert any("blocks in use" in leak for leak in result.leaks)


def test_an_index_that_does_not_remove_blocks_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvIndex, "remove", lambda self, worker, hashes: None)
    result = run_bad_day(hours=0.03, faults=FaultSchedule(0.0, 0.0))
    assert any("blocks too many" in leak for leak in result.leaks)
