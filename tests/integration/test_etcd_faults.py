"""Faults of a real etcd: restarts, lost data, lost leases, compaction, hanging."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from msgspec.structs import replace
from tests.support.relay import Relay
from tests.support.servers import EtcdProcess, find_program, free_port

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.discovery.etcd import EtcdDiscovery
from dynamo.communication.discovery.etcd_client import EtcdClient, EtcdEndpoint, RevisionCompacted
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.errors import ConfigError, PlaneUnavailable, TooLarge
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.runtime.discovery import RepublishingDiscovery
from dynamo_conformance.discovery import read_until

QUICK = PlaneOptions(lease_ttl_s=2.0, dial_timeout_s=1.0)
_roots = itertools.count()
Join = Callable[..., Awaitable[Discovery]]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


@pytest.fixture
async def join(etcd: EtcdProcess) -> AsyncIterator[Join]:
    opened: list[Discovery] = []
    root = f"fault-{next(_roots)}"

    async def join(port: int = 0, options: PlaneOptions = DEFAULT_OPTIONS) -> Discovery:
        plane = await open_discovery(f"etcd://127.0.0.1:{port or etcd.port}/{root}", options)
        opened.append(RepublishingDiscovery(plane))
        return opened[-1]

    yield join
    for plane in opened:
        await plane.close()


async def wait_unreachable(plane: Discovery) -> None:
    async with asyncio.timeout(10):
        while not plane.connection_error:
            await asyncio.sleep(0.01)


async def wait_reachable(plane: Discovery) -> None:
    async with asyncio.timeout(10):
        while plane.connection_error:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("time", range(3))
async def test_a_restart_loses_no_record_and_reports_no_change(
    etcd: EtcdProcess, join: Join, time: int
) -> None:
    owner, watcher = await join(), await join()
    await owner.put("/w/before", b"1")
    async with watcher.watch("/w/") as changes:
        await read_until(changes, "/w/before", b"1")
        etcd.kill()
        await wait_unreachable(owner)
        await wait_unreachable(watcher)
        await owner.put("/w/meanwhile", b"2")
        await owner.delete("/w/before")
        with pytest.raises(PlaneUnavailable, match="etcd at"):
            await watcher.get("/w/")
        etcd.start()
        seen = await read_until(changes, "/w/meanwhile", b"2")
        assert ("/w/before", b"1") not in seen
        await read_until(changes, "/w/before", None) if ("/w/before", None) not in seen else None
    assert dict(await watcher.get("/w/")) == {"/w/meanwhile": b"2"}


async def test_live_records_are_not_reported_deleted_when_etcd_returns_empty(
    etcd: EtcdProcess, join: Join
) -> None:
    lives, dies, watcher = await join(), await join(), await join()
    await lives.put("/w/lives", b"1")
    await dies.put("/w/dies", b"2")
    async with watcher.watch("/w/") as changes:
        await read_until(changes, "/w/dies", b"2")
        etcd.kill()
        await wait_unreachable(watcher)
        await wait_unreachable(dies)
        await dies.close()
        etcd.delete_data()
        etcd.start()
        seen = await read_until(changes, "/w/dies", None)
        assert ("/w/lives", None) not in seen
    assert dict(await watcher.get("/w/")) == {"/w/lives": b"1"}


async def test_records_of_a_dead_process_are_deleted_before_its_lease_expires(
    etcd: EtcdProcess, join: Join
) -> None:
    lives, supervisor = await join(), await join()
    await lives.put("/w/lives", b"3")
    dead = await open_discovery(f"etcd://127.0.0.1:{etcd.port}/{lives._inner._root[1:]}")  # type: ignore[attr-defined]
    await dead.put("/w/dead", b"1")
    await dead.put("/_processes/dead", b"2")
    async with lives.watch("/w/") as changes:
        await read_until(changes, "/w/dead", b"1")
        etcd.kill()
        await wait_unreachable(dead)
        await dead.close()  # etcd does not learn of the close
        async with BackgroundTasks() as tasks:
            deletion = tasks.start(supervisor._inner.revoke_lease_of("/_processes/dead"))  # type: ignore[attr-defined]
            etcd.start()
            await deletion
        await read_until(changes, "/w/dead", None)
    assert dict(await lives.get("/")) == {"/w/lives": b"3"}
    await supervisor._inner.revoke_lease_of("/_processes/dead")  # type: ignore[attr-defined]


async def test_a_lost_lease_is_reported_and_the_records_return(
    etcd: EtcdProcess, join: Join
) -> None:
    owner, watcher, lost = await join(), await join(), asyncio.Event()
    owner.on_lease_lost(lost.set)
    await owner.put("/w/a", b"1")
    async with watcher.watch("/w/") as changes:
        await read_until(changes, "/w/a", b"1")
        plane = owner._inner  # type: ignore[attr-defined]
        assert isinstance(plane, EtcdDiscovery)
        revoke(etcd, plane._lease_id)
        await read_until(changes, "/w/a", None)
        await owner.put("/w/b", b"2")  # the first call that the server refuses
        await lost.wait()
        await read_until(changes, "/w/a", b"1")
    assert dict(await watcher.get("/w/")) == {"/w/a": b"1", "/w/b": b"2"}


async def test_records_of_a_partitioned_owner_expire_and_return(
    etcd: EtcdProcess, join: Join
) -> None:
    async with Relay(etcd.port) as relay:
        owner, watcher = await join(relay.port, QUICK), await join()
        await owner.put("/w/a", b"1")
        async with watcher.watch("/w/") as changes:
            await read_until(changes, "/w/a", b"1")
            relay.silent = True
            await read_until(changes, "/w/a", None)
            await wait_unreachable(owner)
            relay.silent = False
            async with asyncio.timeout(4):
                await read_until(changes, "/w/a", b"1")


async def test_a_disconnected_watcher_is_correct_after_a_compaction(
    etcd: EtcdProcess, join: Join
) -> None:
    async with Relay(etcd.port) as relay:
        owner, watcher = await join(), await join(relay.port, QUICK)
        await owner.put("/w/goes", b"1")
        await owner.put("/w/stays", b"0")
        async with watcher.watch("/w/") as changes:
            await read_until(changes, "/w/stays", b"0")
            relay.silent = True
            relay.abort_connections()
            for number in range(20):
                await owner.put("/w/stays", b"%d" % number)
            await owner.delete("/w/goes")
            compact(etcd)
            relay.silent = False
            await read_until(changes, "/w/goes", None)
        assert dict(await watcher.get("/w/")) == {"/w/stays": b"19"}


async def test_a_compacted_revision_raises(etcd: EtcdProcess) -> None:
    compact(etcd)
    server = EtcdClient(EtcdEndpoint("127.0.0.1", etcd.port), QUICK)
    await server.open(1.0)
    with pytest.raises(RevisionCompacted):
        await anext(server.watch("/", 1))
    await server.close()


async def test_a_hanging_etcd_is_detected_and_used_again(etcd: EtcdProcess, join: Join) -> None:
    owner, watcher = await join(options=QUICK), await join(options=QUICK)
    await owner.put("/w/a", b"1")
    async with watcher.watch("/w/") as changes:
        await read_until(changes, "/w/a", b"1")
        etcd.signal(signal.SIGSTOP)
        await wait_unreachable(owner)
        etcd.signal(signal.SIGCONT)
        await owner.put("/w/b", b"2")
        await read_until(changes, "/w/b", b"2")
        await wait_reachable(owner)


async def test_the_second_server_is_used_if_the_first_is_dead(etcd: EtcdProcess) -> None:
    url = f"etcd://127.0.0.1:{free_port()},127.0.0.1:{etcd.port}/second"
    plane = await open_discovery(url, QUICK)
    await wait_reachable(plane)
    await plane.put("/k", b"1")
    assert dict(await plane.get("/")) == {"/k": b"1"}
    await plane.close()


async def test_without_a_server_calls_do_not_wait_and_closing_is_quick() -> None:
    plane = await open_discovery(f"etcd://127.0.0.1:{free_port()}", QUICK)
    async with asyncio.timeout(5):
        await plane.put("/k", b"1")
        await plane.delete("/k")
        with pytest.raises(PlaneUnavailable):
            await plane.get("/")
        await plane.close()


async def test_invalid_urls_and_large_values_raise() -> None:
    for url in ("etcd://", "etcd://a:b", "etcd://:2379"):
        with pytest.raises(ConfigError):
            await open_discovery(url)
    plane = await open_discovery(f"etcd://127.0.0.1:{free_port()}")
    with pytest.raises(TooLarge):
        await plane.put("/k", bytes(2 << 20))
    await plane.close()


async def test_a_server_with_authentication() -> None:
    with EtcdProcess() as guarded:
        etcdctl(guarded, "user", "add", "root:a password")
        etcdctl(guarded, "user", "grant-role", "root", "root")
        etcdctl(guarded, "auth", "enable")
        stranger = await open_discovery(guarded.url, QUICK)
        plane = await open_discovery(
            guarded.url, replace(QUICK, user="root", password="a password")
        )
        await plane.put("/k", b"1")
        assert dict(await plane.get("/")) == {"/k": b"1"}
        with pytest.raises(PlaneUnavailable):
            await stranger.get("/")
        await stranger.close()
        await plane.close()


async def test_a_cluster_loses_the_server_in_use() -> None:
    nodes = [EtcdProcess() for _ in range(3)]
    cluster = ",".join(f"n{at}=http://127.0.0.1:{node._peer}" for at, node in enumerate(nodes))
    for at, node in enumerate(nodes):
        node._extra = ("--name", f"n{at}", "--initial-cluster", cluster)
    await run_all(*(asyncio.to_thread(node.start) for node in nodes))
    url = "etcd://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    owner, watcher = await open_discovery(url, QUICK), await open_discovery(url, QUICK)
    await owner.put("/w/a", b"1")
    async with watcher.watch("/w/") as changes:
        await read_until(changes, "/w/a", b"1")
        await asyncio.to_thread(nodes[0].kill)  # the server that both planes use
        await owner.put("/w/a", b"2")
        seen = await read_until(changes, "/w/a", b"2")
        assert ("/w/a", None) not in seen
    await owner.close()
    await watcher.close()
    for node in nodes:
        node.close()


def revoke(etcd: EtcdProcess, lease: int) -> None:
    etcdctl(etcd, "lease", "revoke", f"{lease:x}")


def compact(etcd: EtcdProcess) -> None:
    put = etcdctl(etcd, "put", "/compact", "x", "-w", "json")
    etcdctl(etcd, "compact", put.split('"revision":')[1].split(",")[0].split("}")[0])


def etcdctl(etcd: EtcdProcess, *arguments: str) -> str:
    command = [find_program("etcdctl"), "--endpoints", f"127.0.0.1:{etcd.port}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
