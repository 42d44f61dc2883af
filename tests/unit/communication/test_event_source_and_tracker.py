"""Numbering, rings and repair, without a wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo.communication.events import source
from dynamo.communication.events.plane import Dump, Event
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import BufferedEventSource, CatchUp, new_epoch


async def nothing() -> None:
    pass


def now(flush: Callable[[], None]) -> None:
    """Arms nothing: the tests flush."""


def filled(count: int, dump: Dump | None = None) -> BufferedEventSource:
    source = BufferedEventSource(dump, now, lambda first, payloads: None, nothing)
    for number in range(1, count + 1):
        source.publish(b"%d" % number)
    source.flush()
    return source


class Follower:
    """A tracker, what it told, and what it asked."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.asked: list[int] = []
        self.tracker = SequenceTracker("s", "p", 7, self.events.append, self.asked.append)

    def told(self) -> list[tuple[str, int, bytes]]:
        told = [(event.kind, event.sequence, event.payload) for event in self.events]
        self.events.clear()
        return told


def test_epochs_grow() -> None:
    epochs = [new_epoch() for _ in range(100)]
    assert epochs == sorted(set(epochs))


def test_what_is_published_in_a_turn_is_sent_together() -> None:
    sent: list[tuple[int, list[bytes]]] = []
    armed: list[Callable[[], None]] = []
    source = BufferedEventSource(
        None, armed.append, lambda first, batch: sent.append((first, [*batch])), nothing
    )
    source.publish(b"a")
    source.publish(b"b")
    assert len(armed) == 1
    armed.pop()()
    source.publish(b"c")
    armed.pop()()
    assert sent == [(1, [b"a", b"b"]), (3, [b"c"])]


@pytest.mark.parametrize(
    ("after", "first", "payloads"),
    [(-1, 1, [b"1", b"2", b"3"]), (0, 1, [b"1", b"2", b"3"]), (2, 3, [b"3"]), (3, 4, [])],
)
def test_a_whole_ring_answers_any_place(after: int, first: int, payloads: list[bytes]) -> None:
    answer = filled(3).catch_up(after)
    assert (answer.last, answer.first, [*answer.payloads]) == (3, first, payloads)
    assert not answer.dump


def test_a_full_ring_forgets_and_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_RING_EVENTS", 2 * source.RING_DIVISOR_WITH_DUMP)
    assert filled(5, lambda: [b"state"]).catch_up(1) == CatchUp(5, 5, (b"state",), dump=True)
    assert filled(5, lambda: [b"state"]).catch_up(3).payloads == [b"4", b"5"]
    monkeypatch.setattr(source, "MAX_RING_EVENTS", 2)
    assert filled(5).catch_up(1) == CatchUp(5, 4, [b"4", b"5"])
    assert filled(5).catch_up(-1) == CatchUp(5, 6, ())


def test_a_ring_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_RING_BYTES", 10)
    assert [*filled(100)._ring] == [b"97", b"98", b"99", b"100"]


def test_where_every_event_tells_the_state_the_newest_is_kept() -> None:
    source = BufferedEventSource(None, now, lambda first, payloads: None, nothing, latest=True)
    assert source.catch_up(-1) == CatchUp(0, 0, (), dump=True)
    for number in range(1, 100):
        source.publish(b"%d" % number)
    source.flush()
    assert [*source._ring] == [b"99"]
    assert source.catch_up(-1) == CatchUp(99, 99, (b"99",), dump=True)
    assert source.catch_up(5) == CatchUp(99, 99, (b"99",), dump=True)
    assert source.catch_up(98) == CatchUp(99, 99, [b"99"])
    assert source.catch_up(99) == CatchUp(99, 100, ())


def test_the_last_of_the_turn_is_in_the_answer() -> None:
    source = filled(1)
    source.publish(b"2")
    assert source.catch_up(1).payloads == [b"2"]


def test_doubled_events_are_passed_once() -> None:
    one = Follower()
    one.tracker.start()
    one.tracker.on_catch_up(CatchUp(0, 1, ()))
    one.tracker.on_events(1, [b"1", b"2"])
    one.tracker.on_events(1, [b"1", b"2", b"3"])
    one.tracker.on_events(2, [b"2"])
    assert one.told() == [("event", 1, b"1"), ("event", 2, b"2"), ("event", 3, b"3")]


def test_a_gap_asks_once_for_what_is_missing() -> None:
    one = Follower()
    one.tracker.start()
    one.tracker.on_catch_up(CatchUp(1, 1, [b"1"]))
    one.tracker.on_events(4, [b"4"])
    one.tracker.on_events(5, [b"5"])
    one.tracker.on_skipped(5)
    assert one.asked == [-1, 1]
    one.tracker.on_catch_up(CatchUp(5, 2, [b"2", b"3", b"4", b"5"]))
    one.tracker.on_events(6, [b"6"])
    told = one.told()
    assert told.pop(1) == ("stale", 1, b"")
    assert told == [("event", n, b"%d" % n) for n in range(1, 7)]
    assert one.tracker.lost_events == 0


def test_what_nobody_has_any_more_is_counted() -> None:
    one = Follower()
    one.tracker.start()
    one.tracker.on_catch_up(CatchUp(1, 1, [b"1"]))
    one.tracker.on_skipped(9)
    one.tracker.on_catch_up(CatchUp(9, 8, [b"8", b"9"]))
    assert one.tracker.lost_events == 6
    assert [sequence for kind, sequence, _ in one.told() if kind == "event"] == [1, 8, 9]


def test_a_dump_replaces_and_events_go_on_after_it() -> None:
    one = Follower()
    one.tracker.start()
    one.tracker.on_catch_up(CatchUp(5, 5, [b"x", b"y"], dump=True))
    one.tracker.on_events(4, [b"4", b"5", b"6"])
    assert one.told() == [("dump", 5, b"x"), ("event", 5, b"y"), ("event", 6, b"6")]
    assert one.tracker.lost_events == 0


def test_a_new_epoch_without_a_dump_ends_the_old_one() -> None:
    old = Follower()
    events: list[Event] = []
    new = SequenceTracker("s", "p", 8, events.append, lambda after: None, old.tracker)
    new.start()
    new.on_catch_up(CatchUp(1, 1, [b"1"]))
    assert [(event.kind, event.epoch) for event in events] == [("gone", 7), ("event", 8)]


def test_who_came_back_under_its_name_is_not_told_gone_again() -> None:
    """The state of the new epoch replaces the old one's at once; a repair later is just that."""
    follower = Follower()
    before = SequenceTracker("s", "p", 6, follower.events.append, follower.asked.append)
    before.start()
    before.on_catch_up(CatchUp(1, 1, (b"a",), dump=True))
    after = SequenceTracker("s", "p", 7, follower.events.append, follower.asked.append, before)
    after.start()
    after.on_catch_up(CatchUp(0, 0, (b"",), dump=True))
    follower.told()
    after.on_disconnected()
    after.start()
    after.on_catch_up(CatchUp(1, 1, (b"1",)))
    assert follower.told() == [("stale", 0, b""), ("event", 1, b"1")]
