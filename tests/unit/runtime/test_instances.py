"""The live view of an endpoint's instances: discovery, broken connections, ejection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.processes import play_virtually

from dynamo.communication.directory import WATCH_RETRY_S
from dynamo.communication.discovery import RecordChange
from dynamo.core.errors import InstanceGone, NotFound
from dynamo.core.virtual_time import VirtualClock
from dynamo.runtime.calls.instances import (
    MAX_PROBE_INTERVAL_S,
    PROBE_INTERVAL_S,
    Instance,
    InstanceView,
    decode_instance,
    encode_instance,
    instance_key,
)

UNREACHABLE = "unreachable: no process has this address"


def instance(name: str, address: str = "", **capabilities: Any) -> Instance:
    return Instance(name, address or f"memory:{name}", "n", "c", "e", capabilities)


def put(announced: Instance) -> RecordChange:
    return RecordChange(instance_key(announced), encode_instance(announced))


def deleted(name: str) -> RecordChange:
    return RecordChange(instance_key(instance(name)), None)


class FakeCluster:
    """A discovery plane and a request plane around one `InstanceView`.

    The watch delivers the batches of `batches`; an exception in it ends the watch. Calls to the
    addresses in `dead` raise `InstanceGone`, all others raise `call_error` or succeed.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.batches: asyncio.Queue[list[RecordChange] | Exception] = asyncio.Queue()
        self.watch_times: list[float] = []
        self.dead: set[str] = set()
        self.call_error: Exception | None = None
        self.probes: list[tuple[float, str]] = []
        self.broken_listeners: list[Callable[[str], None]] = []
        self.removed: list[str] = []
        self.changes = 0
        fake: Any = self
        self.view = InstanceView(fake, fake, "/n/", clock, lambda seen: not seen.capabilities)
        self.view.on_instance_removed(lambda gone: self.removed.append(gone.id))
        self.view.on_change(self._count_change)

    def _count_change(self) -> None:
        self.changes += 1

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[RecordChange]]]:
        self.watch_times.append(self.clock.now())

        async def batches() -> AsyncIterator[list[RecordChange]]:
            while True:
                batch = await self.batches.get()
                if isinstance(batch, Exception):
                    raise batch
                yield batch

        yield batches()

    def on_connection_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.broken_listeners.append(callback)
        return lambda: self.broken_listeners.remove(callback)

    async def call(self, address: str, *_: Any) -> None:
        self.probes.append((self.clock.now(), address))
        if address in self.dead:
            raise InstanceGone("no process has this address")
        if self.call_error is not None:
            raise self.call_error

    async def announce(self, *changes: RecordChange) -> None:
        self.batches.put_nowait([*changes])
        await self.clock.wait_until_idle()

    async def close(self) -> None:
        await self.view.close()

    @property
    def live(self) -> set[str]:
        return set(self.view.live)


def play(
    scenario: Callable[[FakeCluster], Awaitable[None]], *names: str, verify: bool = False
) -> None:
    """Run `scenario` in a cluster in which the instances `names` are announced."""

    async def run(cluster: FakeCluster) -> None:
        cluster.view._verify = verify
        cluster.batches.put_nowait([put(instance(name)) for name in names])
        await cluster.view.start()
        assert cluster.live == (set() if verify else set(names))
        await scenario(cluster)

    play_virtually(FakeCluster, run)


def test_the_view_follows_additions_changes_and_removals() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.announce(put(instance("c")), deleted("a"))
        assert (cluster.live, cluster.removed) == ({"b", "c"}, ["a"])
        moved = instance("b", "memory:elsewhere")
        await cluster.announce(put(moved))
        assert cluster.view.live["b"] == moved
        before = cluster.changes
        await cluster.announce(put(moved))
        assert (cluster.changes, cluster.removed) == (before, ["a"])

    play(scenario, "a", "b")


def test_an_unreadable_instance_is_removed_and_a_rejected_one_only_gets_no_calls() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.announce(RecordChange(instance_key(instance("a")), b"{"))
        await cluster.announce(put(instance("b", unwanted=True)))
        assert (cluster.live, cluster.removed) == ({"c"}, ["a"])
        await cluster.announce(put(instance("b")))
        await cluster.announce(*(put(instance(name, unwanted=True)) for name in "bd"))
        await cluster.announce(deleted("d"), deleted("b"))
        assert cluster.removed == ["a", "b"]

    play(scenario, "a", "b", "c")


def test_a_new_watch_removes_a_rejected_instance_that_is_not_announced_any_more() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.announce(*(put(instance(name, unwanted=True)) for name in "ab"))
        assert "2 serving with another role" in cluster.view.describe_unavailable()
        cluster.batches.put_nowait(RuntimeError("cut off"))
        await cluster.announce(put(instance("b", unwanted=True)), put(instance("c")))
        await cluster.clock.sleep(2 * WATCH_RETRY_S)
        assert (cluster.live, cluster.removed) == ({"c"}, ["a"])

    play(scenario, "a", "b", "c")


def test_a_failed_watch_removes_no_instance_and_its_successor_replaces_all() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.batches.put_nowait(RuntimeError("cut off"))
        await cluster.clock.sleep(WATCH_RETRY_S / 2)
        assert cluster.live == {"a", "b"}
        await cluster.clock.sleep(WATCH_RETRY_S)
        assert cluster.watch_times == [0.0, WATCH_RETRY_S]
        assert cluster.live == {"a", "b"}
        await cluster.announce(put(instance("b")), put(instance("c")))
        assert (cluster.live, cluster.removed) == ({"b", "c"}, ["a"])
        await cluster.announce(put(instance("d")))
        assert cluster.live == {"b", "c", "d"}

    play(scenario, "a", "b")


def test_a_new_watch_with_unchanged_records_readmits_no_instance() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.dead.add("memory:a")
        cluster.view.mark_unreachable("memory:a")
        assert cluster.view.eject("b")
        unchanged = [put(instance(name)) for name in "abcd"]
        cluster.batches.put_nowait(RuntimeError("cut off"))
        await cluster.clock.sleep(WATCH_RETRY_S)
        await cluster.announce(*unchanged)
        assert cluster.live == {"c", "d"}
        assert (
            cluster.view.describe_unavailable()
            == f"2 excluded for this call, 1 unhealthy, 1 {UNREACHABLE}"
        )
        await cluster.announce(unchanged[0])
        assert cluster.live == {"a", "c", "d"}

    play(scenario, "a", "b", "c", "d")


def test_a_broken_connection_withholds_all_instances_behind_it_until_a_probe_is_answered() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.announce(put(instance("twin", "memory:a")))
        cluster.dead.add("memory:a")
        for _ in range(3):
            cluster.broken_listeners[0]("memory:a")
        assert cluster.live == {"b"}
        await cluster.clock.sleep(100.0)
        assert cluster.live == {"b"}
        times = [at for at, _ in cluster.probes]
        intervals = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        assert intervals[0] == PROBE_INTERVAL_S
        assert intervals[1] == pytest.approx(2 * PROBE_INTERVAL_S)
        assert intervals[-1] == pytest.approx(MAX_PROBE_INTERVAL_S)
        assert max(intervals) == pytest.approx(MAX_PROBE_INTERVAL_S)
        cluster.dead.clear()
        await cluster.clock.sleep(MAX_PROBE_INTERVAL_S + 0.1)
        assert cluster.live == {"a", "b", "twin"}
        probes = len(cluster.probes)
        await cluster.clock.sleep(100.0)
        assert len(cluster.probes) == probes
        cluster.broken_listeners[0]("memory:a")
        assert cluster.live == {"b"}
        await cluster.clock.sleep(PROBE_INTERVAL_S + 0.1)
        assert cluster.live == {"a", "b", "twin"}

    play(scenario, "a", "b")


@pytest.mark.parametrize(("error", "live"), [(NotFound("no such"), True), (OSError("no"), False)])
def test_an_unknown_endpoint_counts_as_an_answer_to_a_probe(error: Exception, live: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.call_error = error
        cluster.view.mark_unreachable("memory:a")
        await cluster.clock.sleep(PROBE_INTERVAL_S + 0.1)
        assert ("a" in cluster.live) is live

    play(scenario, "a", "b")


def test_probing_ends_when_the_instance_leaves_discovery() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.dead.add("memory:a")
        cluster.view.mark_unreachable("memory:a")
        await cluster.announce(deleted("a"))
        await cluster.clock.sleep(50.0)
        assert len(cluster.probes) <= 1
        await cluster.announce(put(instance("a")))
        assert cluster.live == {"a", "b"}

    play(scenario, "a", "b")


def test_at_most_half_of_the_instances_are_ejected() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        assert [cluster.view.eject(name) for name in ("a", "a", "x", "b", "c")] == [
            True,
            False,
            False,
            True,
            False,
        ]
        assert cluster.live == {"c", "d"}
        cluster.view.readmit("a")
        assert cluster.live == {"a", "c", "d"}
        await cluster.announce(deleted("b"))
        await cluster.announce(put(instance("b")))
        assert cluster.live == {"a", "b", "c", "d"}

    play(scenario, "a", "b", "c", "d")


def test_the_last_live_instance_is_not_ejected() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.dead.update(("memory:a", "memory:b"))
        for name in ("a", "b"):
            cluster.view.mark_unreachable(f"memory:{name}")
        assert cluster.view.eject("c") is False
        assert cluster.live == {"c"}

    play(scenario, "a", "b", "c")


def test_a_closed_view_does_not_change() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.view.close()
        await cluster.view.close()
        cluster.view.mark_unreachable("memory:a")
        await cluster.announce(deleted("b"))
        await cluster.clock.sleep(10.0)
        assert (cluster.live, cluster.broken_listeners) == ({"a", "b"}, [])
        assert cluster.probes == []

    play(scenario, "a", "b")


def test_an_answered_probe_readmits_only_the_instances_at_that_address() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.dead.update(("memory:a", "memory:b"))
        cluster.view.mark_unreachable("memory:a")
        cluster.view.mark_unreachable("memory:b")
        cluster.dead.discard("memory:a")
        await cluster.clock.sleep(1.0)
        assert cluster.live == {"a", "c"}
        assert cluster.view.describe_unavailable() == f"2 excluded for this call, 1 {UNREACHABLE}"

    play(scenario, "a", "b", "c")


def test_a_new_watch_with_another_address_readmits_the_instance() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.dead.add("memory:a")
        cluster.view.mark_unreachable("memory:a")
        cluster.batches.put_nowait(RuntimeError("cut off"))
        await cluster.clock.sleep(WATCH_RETRY_S)
        await cluster.announce(put(instance("a", "memory:successor")), put(instance("b")))
        assert cluster.live == {"a", "b"}

    play(scenario, "a", "b")


RECORD_KEY = "/dynamo/workers/worker/generate/1"
GOOD_RECORD = (
    b'{"component": "worker", "endpoint": "generate", "namespace": "dynamo", "lease_id": "1", '
    b'"transport": {"tcp": "tcp://127.0.0.1:1/a"}, "capabilities": {}}'
)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        GOOD_RECORD.replace(b"tcp://127", b"tcp://\xff127"),
        GOOD_RECORD.replace(b'"worker"', b'"\xc3("'),
        GOOD_RECORD.replace(b'"tcp": "tcp://127.0.0.1:1/a"', b""),
        GOOD_RECORD.replace(b'"tcp://127.0.0.1:1/a"', b"5"),
        GOOD_RECORD[:-1],
        GOOD_RECORD + GOOD_RECORD,
    ],
)
def test_a_bad_record_is_skipped(value: bytes) -> None:
    assert decode_instance(RECORD_KEY, GOOD_RECORD) is not None
    assert decode_instance(RECORD_KEY, value) is None
