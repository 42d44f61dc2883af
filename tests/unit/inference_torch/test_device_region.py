"""Blocks in the memory of a device, for which tensors on the CPU stand in: the suites of transfer
backends and of tiers."""

from __future__ import annotations

import ctypes
import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import pytest
from tests.conformance.planes import join_transfer
from tests.conformance.test_transfer import TestMemory, TestNixl, TestShm, TestTcp
from tests.unit.inference_tiers import test_disk, test_remote
from tests.unit.inference_tiers.conftest import clock, open_remote, open_tier
from tests.unit.inference_torch.conftest import stand_in_region

from dynamo.communication.transfer import MemoryRegion, SlotRead
from dynamo.core.errors import TransferFailed
from dynamo_conformance import transfer

pytest.importorskip("torch", reason="make test-torch installs PyTorch")

__all__ = ["TestMemory", "TestNixl", "TestShm", "TestTcp", "clock", "open_remote", "open_tier"]


@pytest.fixture(autouse=True)
def _device_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "allocate_region", stand_in_region)
    monkeypatch.setattr("dynamo.communication.transfer.backend.MIN_TIMEOUT_S", 20.0)


class LateStream:
    """A stream whose work is done when somebody waits for it: as late as a device may."""

    current: LateStream | None = None

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def drain(self) -> None:
        while self.work:
            self.work.pop(0)()


class LateDevice:
    """Stands in for `torch.cuda`."""

    Stream = LateStream

    class Event:
        def record(self, stream: LateStream) -> None:
            self._stream = stream

        def synchronize(self) -> None:
            self._stream.drain()

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        LateStream.current = stream
        yield
        LateStream.current = None


@pytest.fixture
def late_region(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a region of four slots on a device that is late, and two of a host tier."""
    import torch

    copy = torch._foreach_copy_

    def copy_later(*lists: Any, non_blocking: bool) -> None:
        assert non_blocking
        assert LateStream.current is not None
        LateStream.current.work.append(partial(copy, *lists))

    region = stand_in_region(4, 64, host_slots=2)
    monkeypatch.setattr(torch, "_foreach_copy_", copy_later)
    region._api = LateDevice()
    region._computing, region._stream_in, region._stream_out = [LateStream() for _ in range(3)]
    yield region
    region.close()


def write_slot(region: Any, slot: int, data: bytes) -> None:
    with region.writing((slot,)) as (view,):
        view[:] = data


def copy_from_host_tier(region: Any, slot: int, data: bytes) -> None:
    region.slot(5)[:] = data
    region.copy([5], [slot], Event())


def copy_from_peer(region: Any, slot: int, data: bytes) -> None:
    memory = (ctypes.c_char * 192).from_buffer(bytearray(128) + data)
    region.copy_from(ctypes.addressof(memory), [2], [slot], Event())


def copy_from_device_of_peer(region: Any, slot: int, data: bytes) -> None:
    peer = stand_in_region(3, 64)
    peer._blocks[1] = peer._view_host(memoryview(bytearray(data)))[0]
    region.open_shared(peer.share(), 3)(region, [1], [slot])


@pytest.mark.parametrize(
    "write", [write_slot, copy_from_host_tier, copy_from_peer, copy_from_device_of_peer]
)
def test_copies_keep_the_order_of_a_late_device(
    late_region: Any, write: Callable[[Any, int, bytes], None]
) -> None:
    """A step ahead still writes to slot 2, whose sequence has ended, when it gets other content."""
    region, data = late_region, bytes(range(64))
    region._computing.work.append(partial(region._blocks[2].fill_, -1))
    region.generations[2] += 1

    write(region, 2, data)

    region._computing.drain()
    with region.reading((2, 1)) as (view, other):
        assert (bytes(view), bytes(other)) == (data, bytes(64))
    region.copy([2], [4], Event())
    assert bytes(region.slot(4)) == data


def test_parts_of_a_slot_are_written_beside_its_present_bytes(late_region: Any) -> None:
    write_slot(late_region, 3, b"a" * 64)
    with late_region.writing((3,), keeps=True) as (view,):
        view[8:16] = b"b" * 8
    with late_region.reading((3,)) as (view,):
        assert bytes(view) == b"a" * 8 + b"b" * 8 + b"a" * 48


def test_a_failed_write_leaves_the_slot(late_region: Any) -> None:
    write_slot(late_region, 3, b"a" * 64)

    def fail() -> None:
        with late_region.writing((3,)) as (view,):
            view[:8] = b"b" * 8
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    with late_region.reading((3,)) as (view,):
        assert bytes(view) == b"a" * 64
    with pytest.raises(IndexError):
        late_region.slot(3)


def test_only_slots_that_were_handed_out_wait_for_the_device(late_region: Any) -> None:
    region = late_region
    region._computing.work.append(partial(region._blocks[2].fill_, -1))
    write_slot(region, 1, bytes(64))
    assert region._computing.work
    region.generations[2] += 1
    write_slot(region, 2, bytes(64))
    assert not region._computing.work


def test_cuda_gets_back_what_it_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of PyTorch's own values, which no card is here to check."""
    import torch
    from torch.multiprocessing import reductions

    from dynamo.inference.torch.device_region import DeviceRegion

    signature = inspect.signature(reductions.rebuild_cuda_tensor)
    values = (1, b"handle", 640, 128, b"counter", 3, b"event", True)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: values)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *args: args)
    whole = torch.zeros(10, 64, dtype=torch.uint8)
    owner, reader = (DeviceRegion.over(blocks, 0) for blocks in (whole[2:], whole[:5]))
    opened: Any = reader.open_shared(owner.share(), 8)
    known = signature.bind(*opened.args[0]).arguments
    assert [
        known[name]
        for name in (
            "storage_device",
            "storage_handle",
            "storage_size_bytes",
            "storage_offset_bytes",
            "ref_counter_handle",
            "ref_counter_offset",
            "event_handle",
            "event_sync_required",
        )
    ] == [0, *values[1:]]  # the device is the reader's own
    size, stride, offset = (known[f"tensor_{name}"] for name in ("size", "stride", "offset"))
    expected = torch.as_strided(whole.view(torch.int64), size, stride, offset)
    assert expected.data_ptr() == owner.address
    assert (size, known["dtype"]) == ((8, 8), torch.int64)
    with pytest.raises(TransferFailed, match="CUDA opens no memory"):
        reader.open_shared(b"\xc1", 8)


async def test_a_process_without_the_device_is_refused_its_memory() -> None:
    """`auto:` then takes the bytes by TCP."""
    async for join in join_transfer("auto:"):
        owner, reader = await join(), await join()
        source, target = stand_in_region(2, 64), MemoryRegion.allocate(2, 64)
        transfer.write_slot(source, 1, b"x" * 64)
        descriptor = await owner.expose(source, "layout")
        await reader.expose(target, "layout")
        peer = await reader.connect(descriptor)
        assert peer.backend == "tcp"
        await peer.pull([SlotRead(1, 0, 0)])
        assert bytes(target.slot(0)) == b"x" * 64


def find_tests() -> dict[str, Any]:
    """Return the tests of tiers on a disk and in a shared store, by names of their own."""
    needs_server = pytest.mark.skipif(not shutil.which("weed"), reason="weed is not on the path")
    tests = {}
    for kind, module in {"disk": test_disk, "remote": test_remote}.items():
        for name, test in vars(module).items():
            if name.startswith("test_"):
                tests[f"test_{kind}_{name[5:]}"] = needs_server(test) if kind == "remote" else test
    return tests


pytestmark = pytest.mark.timeout(90)  # the first test of a shared store starts the server
globals().update(find_tests())
