"""Replays on workers of which some compute prompts for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.simulation.conftest import BLOCK, chats, cluster

from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.operations.latency_summary import LatencyHistogram
from dynamo.operations.replay.cluster import ReplayCluster
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.result import ReplayResult
from dynamo.operations.replay.trace import TraceConversation
from dynamo.operations.replay.workers import ReplayWorkers
from dynamo.scheduling.router.harm_steering import START_WEIGHT

TOKEN_BYTES = 1000
CHATS = chats(20)


def apart(
    prefill: int = 2, decode: int = 2, *, bytes_per_s: float = float("inf"), **sizes: int
) -> ReplayWorkers:
    """Return prefill workers and decode workers."""
    workers = cluster(1, **sizes)
    (group,) = workers.groups
    groups = [
        replace(group, count=count, engine=replace(group.engine, roles=(role,)))
        for role, count in (("prefill", prefill), ("decode", decode))
    ]
    return replace(workers, groups=groups, transfer=bytes_per_s, kv_bytes_per_token=TOKEN_BYTES)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReplayCluster]]:
    """The clusters of the test's replays."""
    opened: list[ReplayCluster] = []
    enter = ReplayCluster.__aenter__

    async def record(self: ReplayCluster) -> ReplayCluster:
        opened.append(self)
        return await enter(self)

    monkeypatch.setattr(ReplayCluster, "__aenter__", record)
    yield opened
    for opened_cluster in opened:
        for engine in opened_cluster.engines:
            assert engine.scheduler.pool.active == 0


def replay(
    workers: ReplayWorkers,
    disaggregation: str = "always",
    mode: str = "round_robin",
    conversations: Sequence[TraceConversation] = CHATS,
) -> tuple[ReplayResult, ReplayLog]:
    settings = RouterSettings(mode=mode, disaggregation=DisaggregationSettings(mode=disaggregation))
    return Replay(ReplayPlan("synthetic", workers, settings, BLOCK)).run(conversations)


@pytest.mark.parametrize("mode", ["round_robin", "least_loaded", "kv", "adaptive"])
def test_prefill_workers_compute_all_prompts(mode: str, clusters: list[ReplayCluster]) -> None:
    result, _ = replay(apart(), mode=mode)

    assert result.completed == result.requests > 40
    assert not result.prefill_fallbacks
    assert result.prefills.remote >= 0.9 * result.completed  # the others had all blocks cached
    assert sum(result.requests_per_worker[2:]) == result.completed
    assert sum(result.requests_per_worker[:2]) == result.prefills.remote
    assert min(result.requests_per_worker) > 0
    for engine in clusters[0].engines[:2]:
        assert engine.counters.generated_tokens == engine.counters.requests


def test_without_disaggregation_decode_workers_compute_all_prompts(
    clusters: list[ReplayCluster],
) -> None:
    result, log = replay(apart(), "off")
    alone, alone_log = replay(cluster(2))

    assert result.requests_per_worker == [0, 0, *alone.requests_per_worker]
    assert result.kv_bytes_moved == result.prefills.remote == 0
    assert log.ttft_s == alone_log.ttft_s
    assert log.e2e_s == alone_log.e2e_s


def test_gaps_between_tokens_have_no_prefill_in_them(clusters: list[ReplayCluster]) -> None:
    busy = chats(60, per_s=60)
    result, _ = replay(apart(), conversations=busy)
    aggregated, _ = replay(cluster(4), conversations=busy)

    assert aggregated.itl_ms.p95 > 20
    assert result.itl_ms.p95 < 12


def test_a_transfer_takes_its_time_and_is_counted(clusters: list[ReplayCluster]) -> None:
    at_once, _ = replay(apart())
    bytes_per_s = at_once.kv_bytes_moved / at_once.requests / 0.2
    slow, _ = replay(apart(bytes_per_s=bytes_per_s))

    assert slow.kv_bytes_moved > 0
    assert slow.kv_bytes_moved % (BLOCK * TOKEN_BYTES) == 0
    assert slow.ttft_ms.p50 == pytest.approx(at_once.ttft_ms.p50, rel=0.3)
    assert slow.e2e_ms.mean > at_once.e2e_ms.mean + 100


def test_prefill_workers_have_a_timing_of_their_own(clusters: list[ReplayCluster]) -> None:
    workers = apart()
    prefill, decode = workers.groups
    fast = replace(prefill, timing=Timing(c0=1.0, c1=0.0001))
    result, _ = replay(replace(workers, groups=[fast, decode]))
    other, _ = replay(workers)

    assert result.ttft_ms.p50 < 0.3 * other.ttft_ms.p50


def test_workers_with_little_memory_and_few_places_leak_nothing(
    clusters: list[ReplayCluster],
) -> None:
    for mode in ("round_robin", "kv"):
        result, _ = replay(apart(2, 1, num_blocks=100, max_num_seqs=3), mode=mode)
        assert result.completed == result.requests


def test_the_same_seed_gives_the_same_replay(clusters: list[ReplayCluster]) -> None:
    first, again = (replay(apart(bytes_per_s=1e9), "predicted", "kv")[1] for _ in range(2))

    assert first.e2e_s == again.e2e_s


def flexible(count: int = 3) -> ReplayWorkers:
    """Return workers that compute prompts for each other."""
    return replace(cluster(count), transfer=float("inf"))


def replay_with_target(
    itl_slo: float, conversations: Sequence[TraceConversation] = CHATS
) -> tuple[ReplayResult, ReplayLog]:
    disaggregation = DisaggregationSettings(mode="flexible", itl_slo=itl_slo)
    settings = RouterSettings(mode="kv", disaggregation=disaggregation)
    return Replay(ReplayPlan("synthetic", flexible(), settings, BLOCK)).run(conversations)


def test_workers_count_the_gaps_that_clients_see(
    clusters: list[ReplayCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    target_ms, slow = 10.0, 0
    add = LatencyHistogram.add

    def count(self: LatencyHistogram, seconds: float, times: int = 1) -> None:
        nonlocal slow
        slow += times if seconds > target_ms * 1e-3 else 0
        add(self, seconds, times)

    def count_gaps(self: LatencyHistogram, ends: Sequence[float], times: int) -> None:
        for before, after in pairwise(ends):
            count(self, after - before, times)

    monkeypatch.setattr(LatencyHistogram, "add", count)
    monkeypatch.setattr(LatencyHistogram, "add_gaps", count_gaps)
    result, log = replay_with_target(target_ms, chats(60, per_s=60))
    gaps = [engine.token_gaps for engine in clusters[0].engines]

    assert result.prefills.remote > 0
    assert sum(each.gaps for each in gaps) == log.output_tokens - log.completed
    assert 0.01 * log.output_tokens < slow < 0.9 * log.output_tokens
    assert sum(each.slow_gaps for each in gaps) == slow


def test_nothing_is_counted_without_a_target(clusters: list[ReplayCluster]) -> None:
    replay_with_target(0.0)

    assert [engine.token_gaps.gaps for engine in clusters[0].engines] == [0, 0, 0]


def test_a_lower_target_raises_the_price_of_pauses(clusters: list[ReplayCluster]) -> None:
    busy = chats(120, per_s=60)
    for target_ms in (8.0, 1_000.0):
        replay_with_target(target_ms, busy)
    weights = [each.policy.harm_steering.weight for each in clusters]

    assert weights[0] > START_WEIGHT > weights[1]
