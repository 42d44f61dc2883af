"""Parts of the transfer plane: runs, learnt speed, the breaker, queues in virtual time."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.communication.transfer import (
    MemoryRegion,
    SlotRead,
    TransferMetrics,
    open_transfer,
    socket_plane,
)
from dynamo.communication.transfer.estimate import (
    INITIAL_OPEN_S,
    MAX_OPEN_S,
    PeerBreaker,
    TransferEstimate,
)
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.communication.transfer.runs import merge_pairs
from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.telemetry import Registry


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_pairs_name_the_same_copies_in_order(pairs: list[tuple[int, int]]) -> None:
    runs = list(merge_pairs([s for s, _ in pairs], [t for _, t in pairs], 5))
    assert [(s + n, t + n) for s, t, count in runs for n in range(count)] == pairs


def test_consecutive_slots_are_a_run() -> None:
    assert list(merge_pairs([4, 5, 6], [7, 8, 0], 10)) == [(4, 7, 2), (6, 0, 1)]


def test_bandwidth_and_latency_are_learnt() -> None:
    estimate, now = TransferEstimate(0.001, 1e9), 0.0
    for _ in range(50):
        estimate.start(100 << 20, now)
        now += 0.05 + (100 << 20) / 5e9
        estimate.finish(100 << 20, now, completed=True)
        estimate.start(1000, now)
        now += 0.05
        estimate.finish(1000, now, completed=True)
    assert estimate.predict_s(0) == pytest.approx(0.05, rel=0.01)
    assert estimate.predict_s(500_000_000) == pytest.approx(0.15, rel=0.05)


def test_pulls_in_front_make_a_pull_longer() -> None:
    estimate = TransferEstimate(0.0, 1e9)
    estimate.start(1_000_000_000, 0.0)
    assert estimate.predict_s(0) == pytest.approx(1.0)
    estimate.finish(1_000_000_000, 5.0, completed=False)
    assert estimate.predict_s(0) == 0.0
    assert estimate.bytes_per_s == 1e9


def test_overlapping_pulls_share_the_bandwidth() -> None:
    estimate, now = TransferEstimate(0.0, 1e9), 0.0
    for _ in range(40):
        for _ in range(4):
            estimate.start(10_000_000, now)
        for _ in range(4):
            now += 0.005  # 2 GB/s
            estimate.finish(10_000_000, now, completed=True)
    assert estimate.bytes_per_s == pytest.approx(2e9, rel=0.05)


def test_the_breaker_opens_after_three_failures_and_tries_a_single_pull() -> None:
    breaker = PeerBreaker()
    for now in (0.0, 1.0, 2.0):
        assert breaker.start(now)
        breaker.on_failure(now, now + 0.5)
    assert breaker.is_open(2.6)
    assert not breaker.start(2.6)
    later = 2.5 + INITIAL_OPEN_S
    assert breaker.start(later)
    assert not breaker.start(later)
    breaker.on_failure(later, later)
    assert not breaker.start(later + INITIAL_OPEN_S)
    assert breaker.start(later + 2 * INITIAL_OPEN_S)
    breaker.on_success()
    assert breaker.start(later + 2 * INITIAL_OPEN_S)


def test_the_pause_of_a_breaker_is_bounded() -> None:
    breaker, now = PeerBreaker(), 0.0
    for _ in range(40):
        breaker.start(now)
        breaker.on_failure(now, now)
        now += 2 * MAX_OPEN_S
    breaker.start(now)
    breaker.on_failure(now, now)
    assert not breaker.is_open(now + MAX_OPEN_S)


def test_pulls_that_fail_together_are_a_single_failure() -> None:
    breaker = PeerBreaker()
    for _ in range(8):
        breaker.start(0.0)
    for _ in range(8):
        breaker.on_failure(0.0, 1.0)
    assert not breaker.is_open(1.0)


def mapped_regions() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:dynamo-kv")


def test_a_closed_region_gives_its_memory_back() -> None:
    gc.collect()
    before = mapped_regions()
    region = MemoryRegion.allocate(4, 1000)
    region.slot(3)[:] = b"x" * 1000
    region.generations[3] += 1
    fd = region.fd
    region.close()
    region.close()
    assert mapped_regions() <= before
    assert not Path(f"/proc/self/fd/{fd}").exists() or "dynamo-kv" not in str(
        Path(f"/proc/self/fd/{fd}").readlink()
    )


async def _planes(clock: VirtualClock, count: int) -> list[MemoryTransfer]:
    return [MemoryTransfer(clock, bytes_per_s=1e9, latency_s=0.001) for _ in range(count)]


def _region() -> MemoryRegion:
    return MemoryRegion.allocate(4, 100_000_000, with_memory=False)


def test_pulls_wait_for_the_links_of_source_and_target() -> None:
    async def main(clock: VirtualClock) -> list[float]:
        source, first, second = await _planes(clock, 3)
        descriptor = await source.expose(_region(), "x")
        ends = []

        async def pull(plane: MemoryTransfer) -> None:
            await plane.expose(_region(), "x")
            peer = await plane.connect(descriptor)
            ends.append(peer.predict_s(200_000_000))
            await peer.pull([SlotRead(0, 0, 0), SlotRead(1, 0, 1)], timeout_s=9)
            ends.append(clock.now())

        await run_all(pull(first), pull(second))
        return ends

    assert run_in_virtual_time(main) == pytest.approx([0.201, 0.401, 0.201, 0.401])


def test_a_cancelled_pull_gives_its_place_back() -> None:
    async def main(clock: VirtualClock) -> float:
        source, target = await _planes(clock, 2)
        descriptor = await source.expose(_region(), "x")
        await target.expose(_region(), "x")
        peer = await target.connect(descriptor)
        async with BackgroundTasks() as tasks:
            pull = tasks.start(peer.pull([SlotRead(0, 0, 0)], timeout_s=9))
            await clock.sleep(0.02)
            pull.cancel()
            await clock.sleep(0.01)
        return peer.predict_s(0)

    assert run_in_virtual_time(main) == pytest.approx(0.001)


def test_a_generation_that_changes_on_the_way_is_stale() -> None:
    async def main(clock: VirtualClock) -> str:
        source, target = await _planes(clock, 2)
        region = _region()
        descriptor = await source.expose(region, "x")
        await target.expose(_region(), "x")
        peer = await target.connect(descriptor)
        async with BackgroundTasks() as tasks:
            pull = tasks.start(peer.pull([SlotRead(0, 0, 0)], timeout_s=9))
            await clock.sleep(0.05)
            region.generations[0] += 1
            try:
                await pull
            except TransferFailed as error:
                return error.reason
        return ""

    assert run_in_virtual_time(main) == "stale"


@pytest.mark.parametrize("method", ["abort", "sever"])
def test_a_crash_fails_pulls_at_once_and_a_broken_network_in_time(method: str) -> None:
    async def main(clock: VirtualClock) -> tuple[str, float]:
        source, target = await _planes(clock, 2)
        descriptor = await source.expose(_region(), "x")
        await target.expose(_region(), "x")
        peer = await target.connect(descriptor)
        async with BackgroundTasks() as tasks:
            pull = tasks.start(peer.pull([SlotRead(0, 0, 0)], timeout_s=9))
            await clock.sleep(0.05)
            getattr(source, method)()
            try:
                await pull
            except TransferFailed as error:
                return error.reason, clock.now()
        return "", 0.0

    expected = {"abort": ("gone", 0.05), "sever": ("timeout", 9.0)}
    assert run_in_virtual_time(main) == expected[method]


def test_pulls_are_counted() -> None:
    async def main(clock: VirtualClock) -> str:
        registry = Registry()
        (source,) = await _planes(clock, 1)
        target = MemoryTransfer(clock, metrics=TransferMetrics(registry))
        descriptor = await source.expose(_region(), "x")
        await target.expose(_region(), "x")
        peer = await target.connect(descriptor)
        await peer.pull([SlotRead(0, 0, 0)])
        with pytest.raises(TransferFailed):
            await peer.pull([SlotRead(0, 5, 0)])
        return registry.render()

    text = run_in_virtual_time(main)
    assert 'dynamo_transfer_bytes_total{backend="memory"} 100000000' in text
    assert 'dynamo_transfer_failures_total{backend="memory",reason="stale"} 1' in text
    assert 'dynamo_transfer_seconds_count{backend="memory"} 1' in text


@pytest.mark.parametrize("url", ["memory:?gbps=fast", "memory:?speed=3", "memory:?gbps=-1"])
async def test_an_unknown_speed_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="how fast"):
        await open_transfer(url)


async def test_pulls_that_use_all_threads_leave_some_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_plane, "MAX_THREADS", 1)
    planes = [await open_transfer("tcp://127.0.0.1:0") for _ in range(2)]
    regions = [MemoryRegion.allocate(8, 1 << 20) for _ in planes]
    try:
        first, second = [
            await plane.expose(region, "layout")
            for plane, region in zip(planes, regions, strict=True)
        ]
        peers = await planes[0].connect(second), await planes[1].connect(first)
        reads = [SlotRead(slot, 0, 4 + slot) for slot in range(4)]
        for _ in range(5):
            await run_all(*(peer.pull(reads, timeout_s=5.0) for peer in peers))
    finally:
        for plane, region in zip(planes, regions, strict=True):
            await plane.close()
            region.close()


def test_an_error_of_a_transfer_has_its_text_beside_the_reason() -> None:
    with_reason, without = (
        TransferFailed.of("refused", "no such slots"),
        TransferFailed("the peer died"),
    )
    assert (with_reason.message, str(with_reason), with_reason.reason) == (
        "no such slots",
        "no such slots",
        "refused",
    )
    assert (without.message, without.reason) == ("the peer died", "gone")
