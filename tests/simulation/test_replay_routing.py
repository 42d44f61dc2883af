"""Routing on synthetic load: reuse of prefixes, spreading, and bounded memory."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from msgspec.structs import replace
from tests.simulation.conftest import chats, cluster, same, unique

from dynamo.core.values import Load
from dynamo.operations.replay.cluster import ReplayCluster
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.scheduling.workers.workers import WorkerStates


def test_kv_routing_reuses_more_than_round_robin(replay):
    conversations = chats(150, per_s=6)
    kv, _ = replay(conversations)
    round_robin, _ = replay(conversations, "round_robin")
    assert kv.reuse_first_admission > 1.3 * round_robin.reuse_first_admission
    assert kv.ttft_ms.mean < round_robin.ttft_ms.mean


def test_a_hot_prefix_spreads_when_its_worker_is_full(replay):
    """All requests share a prefix, and the first worker that holds it cannot serve them all."""
    conversations = same(400, per_s=60, blocks=24, answer=200)
    kv, _ = replay(conversations)
    round_robin, _ = replay(conversations, "round_robin")
    assert max(kv.requests_per_worker) <= 0.4 * kv.requests
    assert min(kv.requests_per_worker) >= 0.1 * kv.requests
    assert kv.ttft_ms.mean <= 1.1 * round_robin.ttft_ms.mean
    assert kv.e2e_ms.mean <= 1.1 * round_robin.e2e_ms.mean


@pytest.mark.parametrize("workers", [100, 256])
def test_a_burst_over_idle_workers_waits_for_none_of_them(replay, workers):
    """Workers are priced one by one in the first case and as arrays in the second."""
    burst = list(unique(workers - 20, per_s=1e9, blocks=8, answer=5))
    idle = cluster(workers, num_blocks=64)
    kv, _ = replay(burst, workers=idle)
    round_robin, _ = replay(burst, "round_robin", workers=idle)
    assert max(kv.requests_per_worker) == 1
    assert kv.ttft_ms.mean <= 1.1 * round_robin.ttft_ms.mean


def test_a_burst_of_one_prompt_shares_workers_before_any_event(replay):
    """Of twelve simultaneous requests with a long common prefix, few workers compute the prefix."""
    result, log = replay(same(12, per_s=1e9, blocks=300, answer=2))
    assert len({placement.worker for placement in log.placements}) <= 2
    assert result.reuse_first_admission > 0.8


def test_reuse_aware_eviction_outlives_a_flood(replay):
    """A prefix with several uses survives prompts that are used once. The prefix is used every
    3.5 s, and unused blocks last 2 to 3 s."""
    hot = list(same(18, 1.0, 30, 20))
    hot = [
        replace(conversation, start_s=0.2 * index if index < 4 else 3.5 * (index - 3))
        for index, conversation in enumerate(hot)
    ]
    flood = [
        replace(
            conversation,
            requests=[replace(turn, row=turn.row + 10_000) for turn in conversation.requests],
        )
        for conversation in unique(300, 5.0, blocks=60)
    ]
    mixed = sorted([*hot, *flood], key=lambda conversation: conversation.start_s)
    lru, reuse = (
        replay(mixed, "round_robin", workers=cluster(1, num_blocks=1000, eviction=name))[0]
        for name in ("lru", "reuse")
    )
    assert reuse.reuse_first_admission > 2 * lru.reuse_first_admission
    assert reuse.ttft_ms.mean < lru.ttft_ms.mean


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
def test_memory_stays_flat_in_a_flood_of_unique_prompts(replay, mode):
    """A longer flood takes no more memory, except for the log of each request."""
    workers = cluster(2, num_blocks=256)

    def growth(number: int) -> int:
        gc.collect()
        tracemalloc.start()
        replay(unique(number, 8.0, blocks=20), mode, workers=workers)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    short, long = growth(100), growth(300)
    assert (long - short) / 200 < 1000, "bytes a request"


def test_the_index_equals_the_caches_at_the_end(replay, monkeypatch):
    clusters: list[ReplayCluster] = []
    enter = ReplayCluster.__aenter__

    async def remember(self: ReplayCluster) -> ReplayCluster:
        clusters.append(self)
        return await enter(self)

    monkeypatch.setattr(ReplayCluster, "__aenter__", remember)
    _, log = replay(chats(120, per_s=8), workers=cluster(3, num_blocks=256))
    assert isinstance(log, ReplayLog)
    view = clusters[0].cache_view
    assert view is not None
    for number, engine in enumerate(clusters[0].engines):
        cached = {h for event in engine.snapshot_kv_events() for h in getattr(event, "hashes", ())}
        assert cached
        assert view.device_index.get_blocks(str(number)) == cached


def test_mode_adaptive_spreads_a_burst_and_respects_memory(replay):
    """Load reports arrive late, and a worker with little memory is soon full."""
    conversations = chats(150, per_s=6)
    adaptive, _ = replay(conversations, "adaptive")
    round_robin, _ = replay(conversations, "round_robin")
    assert adaptive.ttft_ms.mean <= round_robin.ttft_ms.mean

    groups = [*cluster(2, num_blocks=200).groups, *cluster(2, num_blocks=4096).groups]
    workers = replace(cluster(4), groups=groups)
    adaptive, _ = replay(conversations, "adaptive", workers=workers)
    fewest, _ = replay(conversations, "least_loaded", workers=workers)
    assert adaptive.ttft_ms.mean < fewest.ttft_ms.mean


def test_composite_uses_the_memory_that_workers_report(replay, monkeypatch):
    active_blocks: dict[str, int] = {}
    on_load_report = WorkerStates.on_load_report

    def record(self: WorkerStates, name: str, load: Load, now: float) -> None:
        active_blocks[name] = max(active_blocks.get(name, 0), load.active_blocks)
        on_load_report(self, name, load, now)

    monkeypatch.setattr(WorkerStates, "on_load_report", record)
    replay(chats(60), policy="composite")
    assert sorted(active_blocks) == ["0", "1", "2", "3"]
    assert sum(map(bool, active_blocks.values())) > 1
