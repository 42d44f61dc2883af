"""Faults of the transfer plane: peers killed, frozen, cut off, replaced; strangers; bad bytes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests.conformance.planes import join_transfer
from tests.conformance.test_planes_secret import certificates as certificates
from tests.conformance.test_planes_secret import tls_of
from tests.support.relay import Relay
from tests.support.servers import freeze

from dynamo.communication import handshake, transports
from dynamo.communication.frames import HELLO, pack_frame
from dynamo.communication.handshake import pack_hello
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transfer import (
    MemoryRegion,
    RegionDescriptor,
    SlotRead,
    TransferPlane,
    open_transfer,
    sockets,
    tcp,
)
from dynamo.communication.transfer.sockets import ATTACH
from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo_conformance.transfer import (
    JoinTransfer,
    PullsConformance,
    TransferConformance,
    TransferPair,
    open_pair,
)

SECRET = PlaneOptions(secret="0123456789abcdef-secret")
OTHER_SECRET = PlaneOptions(secret="another-secret-of-16")
SLOTS, SLOT_BYTES = 8, 1_000_000
READS = [SlotRead(slot, 0, slot) for slot in range(SLOTS)]
OWNER = f"""
import asyncio, json, sys, msgspec
from dynamo.communication.transfer import MemoryRegion, open_transfer
async def main():
    region = MemoryRegion.allocate({SLOTS}, {SLOT_BYTES})
    for slot in range({SLOTS}):
        region.slot(slot)[:] = bytes([slot + 1]) * {SLOT_BYTES}
    plane = await open_transfer(sys.argv[1])
    print(json.dumps(msgspec.to_builtins(await plane.expose(region, "layout"))), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class TestTcpTls(PullsConformance):
    @pytest.fixture
    async def join(self, certificates: Path) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("tcp:", tls_of(certificates)):
            yield join


class TestTcpConnections(TransferConformance):
    """Large pulls are split over several connections."""

    @pytest.fixture
    async def join(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JoinTransfer]:
        monkeypatch.setattr(tcp, "CONNECTIONS", 3)
        async for join in join_transfer("tcp:"):
            yield join


class Owner:
    """A process that exposes a region whose slot `n` is full of `n + 1`."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", OWNER, url]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        record = json.loads(self.process.stdout.readline())
        self.descriptor = msgspec.convert(record, RegionDescriptor)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_owner() -> Iterator[Callable[[str], Owner]]:
    owners: list[Owner] = []

    def start(url: str) -> Owner:
        owners.append(Owner(url))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()


class Process(NamedTuple):
    """The stand-in for a process."""

    plane: TransferPlane
    region: MemoryRegion
    descriptor: RegionDescriptor


@asynccontextmanager
async def open_process(
    url: str, options: PlaneOptions = DEFAULT_OPTIONS, layout: str = "layout"
) -> AsyncIterator[Process]:
    region = MemoryRegion.allocate(SLOTS, SLOT_BYTES)
    plane = await open_transfer(url, options)
    try:
        yield Process(plane, region, await plane.expose(region, layout))
    finally:
        await plane.close()
        region.close()


def mapped_peers() -> list[str]:
    """The memory of other processes in this one."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "memfd:dynamo-kv" in line and " r--s " in line]


async def fails(awaitable: object, *reasons: str) -> TransferFailed:
    with pytest.raises(TransferFailed) as caught:
        await awaitable  # type: ignore[misc]
    assert caught.value.reason in reasons, caught.value
    return caught.value


@pytest.mark.parametrize("url", ["shm:", "tcp:", "auto:", "nixl:"])
async def test_a_killed_owner_is_noticed_and_leaves_nothing(
    url: str, start_owner: Callable[[str], Owner]
) -> None:
    owner = start_owner(url)
    name = owner.descriptor.incarnation
    async with open_process(url) as (plane, region, _), BackgroundTasks() as tasks:
        peer = await plane.connect(owner.descriptor)
        await peer.pull(READS)
        assert bytes(region.slot(3)) == b"\4" * SLOT_BYTES

        async def pull_forever() -> None:
            while True:
                await peer.pull(READS)

        pulls = tasks.start(pull_forever())
        await asyncio.sleep(0.01)
        owner.signal(signal.SIGKILL)
        await fails(asyncio.wait_for(pulls, 5), "gone")
        await fails(peer.pull(READS), "gone")
        await fails(plane.connect(owner.descriptor), "gone")
        assert not mapped_peers()
        assert name not in Path("/proc/net/unix").read_text()


@pytest.mark.parametrize("url", ["tcp:", "shm:", "nixl:"])
async def test_a_frozen_owner_costs_the_time_limit(
    url: str, start_owner: Callable[[str], Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start_owner(url)
    for module in (handshake, transports, sockets):
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with open_process(url) as (plane, region, _):
        peer = await plane.connect(owner.descriptor)
        freeze(owner.process.pid)
        with nullcontext() if url == "shm:" else suppress(TransferFailed):
            await peer.pull(READS, timeout_s=0.2)
            assert url != "tcp:"  # the others can read its memory without it, NIXL sometimes
            assert bytes(region.slot(7)) == b"\10" * SLOT_BYTES
        before = bytes(region.memory)
        await asyncio.sleep(0.01)
        assert bytes(region.memory) == before
        await fails(plane.connect(owner.descriptor), "timeout", "gone")
        owner.signal(signal.SIGCONT)
        await peer.pull(READS, timeout_s=10)
        assert bytes(region.slot(0)) == b"\1" * SLOT_BYTES


@asynccontextmanager
async def open_relayed(relay: Relay) -> AsyncIterator[TransferPair]:
    """Yield a pair whose reader reaches the owner through `relay`."""

    async def join() -> TransferPlane:
        return await open_transfer("tcp:")

    async with relay, open_pair(join, SLOT_BYTES, SLOTS) as pair:
        await pair.peer.close()
        relay.target_port = int(pair.descriptor.endpoints[0].rpartition(":")[2])
        endpoint = f"tcp://127.0.0.1:{relay.port}"
        relayed = msgspec.structs.replace(pair.descriptor, endpoints=(endpoint,))
        pair.peer = await pair.reader.connect(relayed)
        yield pair
        await pair.peer.close()


@pytest.mark.parametrize("end", ["reset", "closed"])
async def test_a_cut_pull_fails_and_the_next_one_works(end: str) -> None:
    relay = Relay()
    async with open_relayed(relay) as pair, BackgroundTasks() as tasks:
        relay.delay_s = 0.002
        pull = tasks.start(pair.peer.pull(READS))
        await asyncio.sleep(0.02)
        relay.end_connections(end)  # type: ignore[arg-type]
        await fails(pull, "gone")
        relay.delay_s = 0.0
        await pair.peer.pull(READS)
        assert pair.has(range(SLOTS), range(SLOTS))


async def test_a_stalled_network_costs_the_time_limit() -> None:
    relay = Relay()
    async with open_relayed(relay) as pair:
        relay.silent = True
        await fails(pair.peer.pull(READS, timeout_s=0.1), "timeout")
        relay.silent = False
        before = bytes(pair.target.memory)
        await asyncio.sleep(0.02)
        assert bytes(pair.target.memory) == before
        await pair.peer.pull(READS)
        assert pair.has(range(SLOTS), range(SLOTS))


class CorruptingRelay(Relay):
    """A relay that inverts byte `position` of each answer, counted from the first pull on."""

    position = -1

    def make_reply_filter(self) -> Callable[[bytes], bytes]:
        passed = 0

        def corrupt(data: bytes) -> bytes:
            nonlocal passed
            start, passed = passed, passed + len(data)
            if not start <= self.position < passed:
                return data
            index = self.position - start
            return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]

        return corrupt


@pytest.mark.parametrize("position", [400, 5_000, 1_000_300, 3_000_000, 4_999_999, 8_000_200])
async def test_an_altered_byte_never_passes(position: int) -> None:
    relay = CorruptingRelay()
    async with open_relayed(relay) as pair:
        relay.position = position
        await fails(pair.peer.pull(READS), "checksum", "stale", "refused")
        relay.position = -1
        await pair.peer.pull(READS)
        assert pair.has(range(SLOTS), range(SLOTS))


async def test_another_process_at_the_address_is_another_peer() -> None:
    async with open_process("tcp:") as (plane, region, _):
        async with open_process("tcp:") as former:
            peer = await plane.connect(former.descriptor)
        async with open_process(former.descriptor.endpoints[0]) as present:
            present.region.memory[:] = b"\7" * len(present.region.memory)
            assert present.descriptor.endpoints == former.descriptor.endpoints
            await fails(peer.pull(READS), "gone")
            await fails(plane.connect(former.descriptor), "gone")
            assert bytes(region.memory) == bytes(len(region.memory))
            again = await plane.connect(present.descriptor)
            await again.pull(READS)
            assert bytes(region.memory) == bytes(present.region.memory)


async def test_a_failing_peer_is_spared_and_asked_again_later() -> None:
    relay = Relay()
    async with open_relayed(relay) as pair:
        relay.silent = True
        for _ in range(3):
            assert pair.peer.available
            await fails(pair.peer.pull(READS[:1], timeout_s=0.01), "timeout")
        assert not pair.peer.available
        error = await fails(pair.peer.pull(READS[:1]), "refused")
        assert "failed repeatedly" in error.message
        relay.silent = False
        while not pair.peer.available:
            await asyncio.sleep(0.05)
        await pair.peer.pull(READS)
        assert pair.has(range(SLOTS), range(SLOTS))


@pytest.mark.parametrize("url", ["shm:", "tcp:", "auto:", "nixl:"])
@pytest.mark.parametrize(
    ("owner", "reader"),
    [(SECRET, OTHER_SECRET), (SECRET, DEFAULT_OPTIONS), (DEFAULT_OPTIONS, SECRET)],
    ids=["wrong", "none", "unexpected"],
)
async def test_a_process_without_the_secret_is_refused(
    url: str, owner: PlaneOptions, reader: PlaneOptions
) -> None:
    async with open_process(url, owner) as exposing, open_process(url, reader) as own:
        error = await fails(own.plane.connect(exposing.descriptor), "refused")
        assert "secret" in error.message


@pytest.mark.parametrize("url", ["shm:", "tcp:", "nixl:"])
async def test_the_owner_compares_the_layout_too(url: str) -> None:
    async with open_process(url) as owner, open_process(url, layout="another model") as stranger:
        pretended = msgspec.structs.replace(owner.descriptor, layout="another model")
        error = await fails(stranger.plane.connect(pretended), "refused")
        assert "another model" in error.message


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes(64),
    pack_frame(HELLO, b"\xff\xff"),
    pack_hello("requests"),
    pack_hello("transfer") + pack_frame(ATTACH, b"\xc1"),
    pack_hello("transfer") + pack_frame(200, b""),
    b"\xff\xff\xff\xff\0\0\0\0",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_stranger_is_disconnected(garbage: bytes) -> None:
    async def join() -> TransferPlane:
        return await open_transfer("tcp:")

    async with open_pair(join) as pair:
        port = int(pair.descriptor.endpoints[0].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        if garbage == bytes(64):
            writer.write_eof()
        try:
            while await reader.read(1 << 16):
                continue
        except ConnectionError:
            pass
        writer.close()
        await pair.peer.pull(pair.reads((1,), (2,)))
        assert pair.has((1,), (2,))


async def test_silent_strangers_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with open_process("tcp:") as (_, _, descriptor):
        port = int(descriptor.endpoints[0].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert not await reader.read()
        writer.close()


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "auto://0.0.0.0:0"])
async def test_beyond_this_machine_a_secret_is_needed(url: str) -> None:
    with pytest.raises(ConfigError, match="requires a secret"):
        await open_transfer(url)
    plane = await open_transfer(url, SECRET)
    await plane.close()


async def test_auto_takes_tcp_from_another_host() -> None:
    async with open_process("auto:") as (plane, region, _), open_process("auto:") as owner:
        owner.region.memory[:] = b"\5" * len(owner.region.memory)
        here = await plane.connect(owner.descriptor)
        assert here.backend == "shm"
        _, by_tcp = owner.descriptor.endpoints
        away = ("shm://another-host/x", by_tcp)
        peer = await plane.connect(msgspec.structs.replace(owner.descriptor, endpoints=away))
        assert peer.backend == "tcp"
        await peer.pull(READS)
        assert bytes(region.memory) == bytes(owner.region.memory)


async def test_backends_that_do_not_match_are_named() -> None:
    async with open_process("tcp:") as reader, open_process("shm:") as owner:
        error = await fails(reader.plane.connect(owner.descriptor), "refused")
        assert "no endpoint tcp:" in error.message
        assert "--transfer-plane" in error.hint


def test_a_region_cannot_shrink() -> None:
    region = MemoryRegion.allocate(4, 100)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    region.close()
