"""Who is there, as a client sees it: what discovery says, who broke, who is not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.processes import play_virtually

from dynamo.communication.discovery import RecordChange
from dynamo.core.errors import InstanceGone, NotFound
from dynamo.core.virtual_time import VirtualClock
from dynamo.runtime.calls.instances import (
    MAX_PROBE_INTERVAL_S,
    PROBE_INTERVAL_S,
    WATCH_RETRY_S,
    Instance,
    InstanceView,
    encode_instance,
    instance_key,
)


def instance(name: str, address: str = "", **capabilities: Any) -> Instance:
    return Instance(name, address or f"memory:{name}", "n", "c", "e", capabilities)


def put(one: Instance) -> RecordChange:
    return RecordChange(instance_key(one), encode_instance(one))


def gone(name: str) -> RecordChange:
    return RecordChange(instance_key(instance(name)), None)


class World:
    """Discovery, whose watch says what `tell` is given (an exception ends it), and processes at
    addresses, which answer unless they are `dead`."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.said: asyncio.Queue[list[RecordChange] | Exception] = asyncio.Queue()
        self.watches: list[float] = []
        self.dead: set[str] = set()
        self.odd: Exception | None = None
        self.asked: list[tuple[float, str]] = []
        self.broken: list[Callable[[str], None]] = []
        self.left: list[str] = []
        self.changes = 0
        parts: Any = self
        self.view = InstanceView(parts, parts, "/n/", clock, lambda one: not one.capabilities)
        self.view.on_instance_removed(lambda one: self.left.append(one.id))
        self.view.on_change(self._changed)

    def _changed(self) -> None:
        self.changes += 1

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[RecordChange]]]:
        self.watches.append(self.clock.now())

        async def batches() -> AsyncIterator[list[RecordChange]]:
            while True:
                batch = await self.said.get()
                if isinstance(batch, Exception):
                    raise batch
                yield batch

        yield batches()

    def on_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.broken.append(callback)
        return lambda: self.broken.remove(callback)

    async def call(self, address: str, *_: Any) -> None:
        self.asked.append((self.clock.now(), address))
        if address in self.dead:
            raise InstanceGone("nobody")
        if self.odd is not None:
            raise self.odd

    async def tell(self, *changes: RecordChange) -> None:
        self.said.put_nowait([*changes])
        await self.clock.wait_until_idle()

    async def close(self) -> None:
        await self.view.close()

    @property
    def live(self) -> set[str]:
        return set(self.view.live)


def play(what: Callable[[World], Awaitable[None]], *names: str) -> None:
    """`what` in a world of these instances."""

    async def begin(world: World) -> None:
        world.said.put_nowait([put(instance(name)) for name in names])
        await world.view.start()
        assert world.live == set(names)
        await what(world)

    play_virtually(World, begin)


def test_what_comes_changes_and_goes() -> None:
    async def what(world: World) -> None:
        await world.tell(put(instance("c")), gone("a"))
        assert (world.live, world.left) == ({"b", "c"}, ["a"])
        moved = instance("b", "memory:elsewhere")
        await world.tell(put(moved))
        assert world.view.live["b"] == moved
        before = world.changes
        await world.tell(put(moved))
        assert (world.changes, world.left) == (before, ["a"])

    play(what, "a", "b")


def test_who_becomes_unreadable_or_unwanted_is_gone() -> None:
    async def what(world: World) -> None:
        await world.tell(RecordChange(instance_key(instance("a")), b"{"))
        await world.tell(put(instance("b", unwanted=True)))
        assert (world.live, world.left) == ({"c"}, ["a", "b"])

    play(what, "a", "b", "c")


def test_a_watch_that_fails_takes_nobody_away_and_its_successor_tells_all() -> None:
    async def what(world: World) -> None:
        world.said.put_nowait(RuntimeError("cut off"))
        await world.clock.sleep(WATCH_RETRY_S / 2)
        assert world.live == {"a", "b"}
        await world.clock.sleep(WATCH_RETRY_S)
        assert world.watches == [0.0, WATCH_RETRY_S]
        assert world.live == {"a", "b"}
        await world.tell(put(instance("b")), put(instance("c")))
        assert (world.live, world.left) == ({"b", "c"}, ["a"])
        await world.tell(put(instance("d")))
        assert world.live == {"b", "c", "d"}

    play(what, "a", "b")


def test_a_new_watch_that_says_the_same_does_not_heal() -> None:
    async def what(world: World) -> None:
        world.dead.add("memory:a")
        world.view.mark_unreachable("memory:a")
        assert world.view.eject("b")
        same = [put(instance(name)) for name in "abcd"]
        world.said.put_nowait(RuntimeError("cut off"))
        await world.clock.sleep(WATCH_RETRY_S)
        await world.tell(*same)
        assert world.live == {"c", "d"}
        assert (
            world.view.describe_unavailable()
            == "1 not answering, 2 not wanted for this call, 1 unhealthy"
        )
        await world.tell(same[0])
        assert world.live == {"a", "c", "d"}

    play(what, "a", "b", "c", "d")


def test_a_broken_connection_withholds_all_behind_it_until_an_answer() -> None:
    async def what(world: World) -> None:
        await world.tell(put(instance("twin", "memory:a")))
        world.dead.add("memory:a")
        for _ in range(3):
            world.broken[0]("memory:a")
        assert world.live == {"b"}
        await world.clock.sleep(100.0)
        assert world.live == {"b"}
        times = [at for at, _ in world.asked]
        pauses = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        assert pauses[0] == PROBE_INTERVAL_S
        assert pauses[1] == pytest.approx(2 * PROBE_INTERVAL_S)
        assert pauses[-1] == pytest.approx(MAX_PROBE_INTERVAL_S)
        assert max(pauses) == pytest.approx(MAX_PROBE_INTERVAL_S)
        world.dead.clear()
        await world.clock.sleep(MAX_PROBE_INTERVAL_S + 0.1)
        assert world.live == {"a", "b", "twin"}
        asked = len(world.asked)
        await world.clock.sleep(100.0)
        assert len(world.asked) == asked
        world.broken[0]("memory:a")
        assert world.live == {"b"}
        await world.clock.sleep(PROBE_INTERVAL_S + 0.1)
        assert world.live == {"a", "b", "twin"}

    play(what, "a", "b")


@pytest.mark.parametrize(("error", "back"), [(NotFound("no such"), True), (OSError("no"), False)])
def test_any_answer_says_that_a_process_is_there(error: Exception, back: bool) -> None:
    async def what(world: World) -> None:
        world.odd = error
        world.view.mark_unreachable("memory:a")
        await world.clock.sleep(PROBE_INTERVAL_S + 0.1)
        assert ("a" in world.live) is back

    play(what, "a", "b")


def test_nobody_is_asked_after_who_has_left_meanwhile() -> None:
    async def what(world: World) -> None:
        world.dead.add("memory:a")
        world.view.mark_unreachable("memory:a")
        await world.tell(gone("a"))
        await world.clock.sleep(50.0)
        assert len(world.asked) <= 1
        await world.tell(put(instance("a")))
        assert world.live == {"a", "b"}

    play(what, "a", "b")


def test_half_of_all_are_never_left_out_as_unfit() -> None:
    async def what(world: World) -> None:
        assert [world.view.eject(name) for name in ("a", "a", "x", "b", "c")] == [
            True,
            False,
            False,
            True,
            False,
        ]
        assert world.live == {"c", "d"}
        world.view.readmit("a")
        assert world.live == {"a", "c", "d"}
        await world.tell(gone("b"))
        await world.tell(put(instance("b")))
        assert world.live == {"a", "b", "c", "d"}

    play(what, "a", "b", "c", "d")


def test_nor_is_the_last_that_answers() -> None:
    async def what(world: World) -> None:
        world.dead.update(("memory:a", "memory:b"))
        for name in ("a", "b"):
            world.view.mark_unreachable(f"memory:{name}")
        assert world.view.eject("c") is False
        assert world.live == {"c"}

    play(what, "a", "b", "c")


def test_what_is_known_at_the_close_stays() -> None:
    async def what(world: World) -> None:
        await world.view.close()
        await world.view.close()
        world.view.mark_unreachable("memory:a")
        await world.tell(gone("b"))
        await world.clock.sleep(10.0)
        assert (world.live, world.broken, world.asked) == ({"a", "b"}, [], [])

    play(what, "a", "b")


def test_an_answer_brings_back_only_who_gave_it() -> None:
    async def what(world: World) -> None:
        world.dead.update(("memory:a", "memory:b"))
        world.view.mark_unreachable("memory:a")
        world.view.mark_unreachable("memory:b")
        world.dead.discard("memory:a")
        await world.clock.sleep(1.0)
        assert world.live == {"a", "c"}
        assert world.view.describe_unavailable() == "1 not answering, 2 not wanted for this call"

    play(what, "a", "b", "c")


def test_a_new_watch_that_tells_another_address_heals() -> None:
    async def what(world: World) -> None:
        world.dead.add("memory:a")
        world.view.mark_unreachable("memory:a")
        world.said.put_nowait(RuntimeError("cut off"))
        await world.clock.sleep(WATCH_RETRY_S)
        await world.tell(put(instance("a", "memory:successor")), put(instance("b")))
        assert world.live == {"a", "b"}

    play(what, "a", "b")
