"""The transfer plane as a library: merged descriptors, strategies, a pool, one-sided writes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.communication.options import PlaneOptions
from dynamo.communication.transfer import (
    ContinuousBlockMerger,
    MemoryDescriptorOptimizer,
    MemoryPool,
    MemoryRegion,
    NetworkOptimizer,
    NIXLClient,
    RegionDescriptor,
    SlotRead,
    TransferPlane,
    open_transfer,
)
from dynamo.communication.transfer.auto import AutoTransfer
from dynamo.communication.transfer.backend import TransferBackend
from dynamo.communication.transfer.compression import (
    PLAIN_EVERY,
    LinkCompression,
    compress,
    decompress,
)
from dynamo.communication.transfer.nixl import NixlTransfer
from dynamo.communication.transfer.tcp import TcpPeer, TcpTransfer
from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.library.transfer_optimizers import (
    MemoryDescriptor,
    NetworkOptimizerConfig,
    TransferRequest,
)


@given(st.sets(st.integers(0, 60)), st.randoms(use_true_random=False))
def test_merged_blocks_cover_the_same_bytes(slots: set[int], rng: Random) -> None:
    raw = [MemoryDescriptor(slot % 2, slot // 2 * 16, 16) for slot in slots]
    rng.shuffle(raw)
    merged = ContinuousBlockMerger().merge_continuous_blocks(raw)
    covered = [(m.device, byte) for m in merged for byte in range(m.address, m.end)]
    assert sorted(covered) == sorted(
        (r.device, byte) for r in raw for byte in range(r.address, r.end)
    )
    pairs = pairwise(merged)
    assert all((a.device, a.end) != (b.device, b.address) for a, b in pairs)


def test_descriptors_are_merged_planned_and_cached() -> None:
    optimizer = MemoryDescriptorOptimizer()
    raw = [SimpleNamespace(gpu_addr=n << 20, size=1 << 20) for n in range(12)]
    raw.append(SimpleNamespace(gpu_addr=99 << 20, size=100))
    optimized = optimizer.optimize_descriptors(raw)
    assert [block.size for block in optimized.blocks] == [12 << 20, 100]
    assert optimized.compression_ratio == 6.5
    assert [block for group in optimized.transfer_plan for block in group] == list(optimized.blocks)
    assert optimizer.optimize_descriptors(list(raw)) is optimized
    assert optimizer.optimize_descriptors([]).compression_ratio == 1.0
    with pytest.raises(ValueError, match="gpu_addr"):
        optimizer.optimize_descriptors([{"size": 1}])


async def test_the_strategy_follows_size_and_link() -> None:
    optimizer = NetworkOptimizer(NetworkOptimizerConfig(1 << 20, 0.05))
    for _ in range(60):
        optimizer.observe("a", "b", 10_000_000, 1.0)
        optimizer.observe("a", "c", 10_000_000, 0.001)
    text = b"all work and no play " * 10_000
    requests = {
        "direct": TransferRequest(100_000, "a", "b", data_sample=text),
        "chunked": TransferRequest(1_000_000, "a", "b", data_sample=text),
        "compressed": TransferRequest(10_000_000, "a", "b", data_sample=text),
    }
    for kind, request in requests.items():
        transfer = await optimizer.optimize_data_transfer(request)
        assert transfer.strategy.kind == kind
        assert transfer.expected_bandwidth == pytest.approx(10e6, rel=0.1)
        assert transfer.predicted_latency == pytest.approx(request.data_size / 10e6, rel=0.2)
        assert (transfer.compression_ratio > 2) == (kind == "compressed")
    noise = Random(1).randbytes(100_000)
    for destination, sample in (("c", text), ("b", noise), ("b", b"")):
        request = TransferRequest(10_000_000, "a", destination, data_sample=sample)
        assert (await optimizer.optimize_data_transfer(request)).strategy.kind != "compressed"


def test_a_slow_link_is_worth_compression() -> None:
    link = LinkCompression()
    chosen = [link.choose(10e6) for _ in range(PLAIN_EVERY)]
    assert chosen.count(True) == PLAIN_EVERY - 1
    assert not any(link.choose(3e9) for _ in range(PLAIN_EVERY))
    for _ in range(20):
        link.on_pulled(1 << 20, 1 << 20, 0.2, 10e6)  # random numbers do not shrink
    assert link.ratio == pytest.approx(1.0, abs=0.01)
    assert not any(link.choose(10e6) for _ in range(PLAIN_EVERY))


async def test_compressed_blocks_arrive_whole() -> None:
    options = PlaneOptions(compression="zstd")
    planes = [await open_transfer("tcp:", options) for _ in range(2)]
    regions = [MemoryRegion.allocate(6, 300_000) for _ in planes]
    try:
        regions[0].memory[:] = bytes(900_000) + Random(2).randbytes(900_000)
        descriptor = await planes[0].expose(regions[0], "layout")
        await planes[1].expose(regions[1], "layout")
        peer = await planes[1].connect(descriptor)
        assert isinstance(peer, TcpPeer)
        assert peer._compression is not None
        peer._link.bytes_per_s = 1e6
        await peer.pull([SlotRead(slot, 0, 5 - slot) for slot in range(6)])
        for slot in range(6):
            assert regions[1].slot(5 - slot) == regions[0].slot(slot)
        assert peer._compression.ratio == pytest.approx(1.25 + 0.25 * (2.0 - 1.25), rel=0.01)
        regions[0].generations[2] += 1
        with pytest.raises(TransferFailed, match="something else"):
            await peer.pull([SlotRead(2, 0, 2)])
    finally:
        for plane, region in zip(planes, regions, strict=True):
            await plane.close()
            region.close()


def test_damaged_compression_is_refused() -> None:
    slot = memoryview(bytearray(1000))
    whole = compress(memoryview(bytes(1000)))
    with pytest.raises(TransferFailed, match="zstd"):
        decompress(memoryview(b"\0" + bytes(whole)[1:]), slot)
    with pytest.raises(TransferFailed, match="is no slot of 1000"):
        decompress(memoryview(compress(memoryview(bytes(2000)))), slot)


async def test_a_pool_lends_each_slot_once() -> None:
    pool = MemoryPool.allocate(1000, 4000)
    taken = await pool.take(3)
    assert sorted([*taken, *await pool.take(3)]) == [0, 1, 2, 3]
    waiting = asyncio.create_task(pool.take(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.release(taken[:1])
    assert await waiting == taken[:1]
    assert pool.free_slots == 0
    pool.release([*taken, *taken])
    pool.release([*taken, 4])
    assert pool.free_slots == 3
    pool.region.close()


async def test_a_client_writes_into_registered_memory_of_another() -> None:
    source, target = MemoryRegion.allocate(2, 4096), MemoryRegion.allocate(2, 4096)
    source.slot(1)[:] = b"\7" * 4096
    writer, owner = NIXLClient(SimpleNamespace(enable_rdma=False)), NIXLClient()
    try:
        await writer.register(source.address, 8192)
        with pytest.raises(ConfigError, match="no process is connected"):
            await writer.rdma_write_async(source.address, target.address, 10)
        name = await writer.connect(await owner.register(target.address, 8192))
        await writer.rdma_write_async(source.address + 4096, target.address, 4000)
        await writer.rdma_write_async(source.address + 4096, target.address + 5000, 8, name)
        assert bytes(target.slot(0)) == b"\7" * 4000 + bytes(96)
        assert bytes(target.slot(1))[900:920] == bytes(4) + b"\7" * 8 + bytes(8)
    finally:
        await writer.close()
        await owner.close()
        source.close()
        target.close()


@asynccontextmanager
async def auto_pair(rdma: bool) -> AsyncIterator[tuple[TransferPlane, RegionDescriptor]]:
    """A plane, and the description of another one's region as seen from another host."""
    planes = [await open_transfer("auto:", PlaneOptions(rdma=rdma)) for _ in range(2)]
    regions = [MemoryRegion.allocate(4, 1000) for _ in planes]
    regions[0].generations[0] = 7  # a probe reads blocks of any generation
    try:
        descriptor = await planes[0].expose(regions[0], "layout")
        await planes[1].expose(regions[1], "layout")
        away = ("shm://another-host/x", *descriptor.endpoints[1:])
        yield planes[1], msgspec.structs.replace(descriptor, endpoints=away)
    finally:
        for plane, region in zip(planes, regions, strict=True):
            await plane.close()
            region.close()


async def slow_probe(backend: TransferBackend, descriptor: RegionDescriptor) -> float:
    return 60.0 + await TransferBackend.probe(backend, descriptor)


async def failing_probe(backend: TransferBackend, descriptor: RegionDescriptor) -> float:
    await asyncio.sleep(0)
    text = f"{backend.scheme} cannot read {descriptor.slots} slots"
    raise TransferFailed.of("gone", text)


@pytest.mark.parametrize("probe", [slow_probe, failing_probe])
@pytest.mark.parametrize(("other", "chosen"), [(TcpTransfer, "nixl"), (NixlTransfer, "tcp")])
async def test_auto_uses_the_quicker_network_backend(
    monkeypatch: pytest.MonkeyPatch, other: type[TransferBackend], chosen: str, probe: Any
) -> None:
    monkeypatch.setattr(NixlTransfer, "probe", TransferBackend.probe)
    monkeypatch.setattr(TcpTransfer, "probe", TransferBackend.probe)
    monkeypatch.setattr(other, "probe", probe)
    async with auto_pair(rdma=True) as (plane, descriptor):
        assert isinstance(plane, AutoTransfer)
        peer, rejected = await plane.choose(descriptor)
        await peer.pull([SlotRead(0, 7, 1)])
        assert peer.backend == chosen
        assert "another host" in rejected["shm"]
        assert ("slower: a read" if probe is slow_probe else "cannot read 4") in rejected[
            other.scheme
        ]
        assert len(rejected) == 2


async def test_auto_probes_nothing_where_one_backend_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TransferBackend, "probe", failing_probe)
    async with auto_pair(rdma=False) as (plane, descriptor):
        peer = await plane.connect(descriptor)
        await peer.pull([SlotRead(0, 7, 1)])
        assert peer.backend == "tcp"


async def test_a_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    for name in ("nixl", "nixl_agent"):
        monkeypatch.delitem(sys.modules, f"dynamo.communication.transfer.{name}", raising=False)
    with pytest.raises(ConfigError, match="needs the library") as caught:
        await open_transfer("nixl:")
    assert "pip install --no-deps nixl-cu12" in caught.value.hint
