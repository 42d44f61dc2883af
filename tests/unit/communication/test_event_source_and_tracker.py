"""Tests of BufferedEventSource and SequenceTracker without a connection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo.communication.events import source
from dynamo.communication.events.plane import MAX_RING_BYTES, Dump, Event
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import BufferedEventSource, CatchUp, new_epoch


async def nothing() -> None:
    pass


def schedule_nothing(flush: Callable[[], None]) -> None:
    """Schedule nothing: the tests call flush."""


def filled(
    count: int, dump: Dump | None = None, max_bytes: int = MAX_RING_BYTES
) -> BufferedEventSource:
    source = BufferedEventSource(
        dump, schedule_nothing, lambda first, payloads: None, nothing, max_bytes=max_bytes
    )
    for number in range(1, count + 1):
        source.publish(b"%d" % number)
    source.flush()
    return source


class TrackerRecorder:
    """A tracker with the events that it emitted and the catch-ups that it requested."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.requests: list[int] = []
        self.tracker = SequenceTracker("s", "p", 7, self.events.append, self.requests.append)

    def pop_events(self) -> list[tuple[str, int, bytes]]:
        events = [(event.kind, event.sequence, event.payload) for event in self.events]
        self.events.clear()
        return events


def test_epochs_grow() -> None:
    epochs = [new_epoch() for _ in range(100)]
    assert epochs == sorted(set(epochs))


def test_events_of_one_loop_iteration_are_sent_together() -> None:
    sent: list[tuple[int, list[bytes]]] = []
    scheduled: list[Callable[[], None]] = []
    source = BufferedEventSource(
        None, scheduled.append, lambda first, batch: sent.append((first, [*batch])), nothing
    )
    source.publish(b"a")
    source.publish(b"b")
    assert len(scheduled) == 1
    scheduled.pop()()
    source.publish(b"c")
    scheduled.pop()()
    assert sent == [(1, [b"a", b"b"]), (3, [b"c"])]


@pytest.mark.parametrize(
    ("after", "first", "payloads"),
    [(-1, 1, [b"1", b"2", b"3"]), (0, 1, [b"1", b"2", b"3"]), (2, 3, [b"3"]), (3, 4, [])],
)
def test_a_complete_ring_answers_any_position(
    after: int, first: int, payloads: list[bytes]
) -> None:
    catch_up = filled(3).catch_up(after)
    assert (catch_up.last, catch_up.first, [*catch_up.payloads]) == (3, first, payloads)
    assert not catch_up.dump


def test_a_full_ring_drops_events_and_answers_with_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_RING_EVENTS", 2 * source.RING_DIVISOR_WITH_DUMP)
    assert filled(5, lambda: [b"state"]).catch_up(1) == CatchUp(5, 5, (b"state",), dump=True)
    assert filled(5, lambda: [b"state"]).catch_up(3).payloads == [b"4", b"5"]
    monkeypatch.setattr(source, "MAX_RING_EVENTS", 2)
    assert filled(5).catch_up(1) == CatchUp(5, 4, [b"4", b"5"])
    assert filled(5).catch_up(-1) == CatchUp(5, 6, ())


def test_a_ring_is_bounded_in_bytes() -> None:
    assert [*filled(100, max_bytes=10)._ring] == [b"97", b"98", b"99", b"100"]


def test_a_latest_source_keeps_only_the_newest_event() -> None:
    source = BufferedEventSource(
        None, schedule_nothing, lambda first, payloads: None, nothing, latest=True
    )
    assert source.catch_up(-1) == CatchUp(0, 0, (), dump=True)
    for number in range(1, 100):
        source.publish(b"%d" % number)
    source.flush()
    assert [*source._ring] == [b"99"]
    assert source.catch_up(-1) == CatchUp(99, 99, (b"99",), dump=True)
    assert source.catch_up(5) == CatchUp(99, 99, (b"99",), dump=True)
    assert source.catch_up(98) == CatchUp(99, 99, [b"99"])
    assert source.catch_up(99) == CatchUp(99, 100, ())


def test_a_catch_up_contains_pending_events() -> None:
    source = filled(1)
    source.publish(b"2")
    assert source.catch_up(1).payloads == [b"2"]


def test_duplicate_events_are_emitted_once() -> None:
    recorder = TrackerRecorder()
    recorder.tracker.start()
    recorder.tracker.on_catch_up(CatchUp(0, 1, ()))
    recorder.tracker.on_events(1, [b"1", b"2"])
    recorder.tracker.on_events(1, [b"1", b"2", b"3"])
    recorder.tracker.on_events(2, [b"2"])
    assert recorder.pop_events() == [("event", 1, b"1"), ("event", 2, b"2"), ("event", 3, b"3")]


def test_a_gap_requests_one_catch_up() -> None:
    recorder = TrackerRecorder()
    recorder.tracker.start()
    recorder.tracker.on_catch_up(CatchUp(1, 1, [b"1"]))
    recorder.tracker.on_events(4, [b"4"])
    recorder.tracker.on_events(5, [b"5"])
    recorder.tracker.on_skipped(5)
    assert recorder.requests == [-1, 1]
    recorder.tracker.on_catch_up(CatchUp(5, 2, [b"2", b"3", b"4", b"5"]))
    recorder.tracker.on_events(6, [b"6"])
    events = recorder.pop_events()
    assert events.pop(1) == ("stale", 1, b"")
    assert events == [("event", n, b"%d" % n) for n in range(1, 7)]
    assert recorder.tracker.lost_events == 0


def test_unrepairable_events_are_counted() -> None:
    recorder = TrackerRecorder()
    recorder.tracker.start()
    recorder.tracker.on_catch_up(CatchUp(1, 1, [b"1"]))
    recorder.tracker.on_skipped(9)
    recorder.tracker.on_catch_up(CatchUp(9, 8, [b"8", b"9"]))
    assert recorder.tracker.lost_events == 6
    assert [sequence for kind, sequence, _ in recorder.pop_events() if kind == "event"] == [1, 8, 9]


def test_events_continue_after_a_dump() -> None:
    recorder = TrackerRecorder()
    recorder.tracker.start()
    recorder.tracker.on_catch_up(CatchUp(5, 5, [b"x", b"y"], dump=True))
    recorder.tracker.on_events(4, [b"4", b"5", b"6"])
    assert recorder.pop_events() == [("dump", 5, b"x"), ("event", 5, b"y"), ("event", 6, b"6")]
    assert recorder.tracker.lost_events == 0


def test_a_new_epoch_without_a_dump_emits_gone() -> None:
    old = TrackerRecorder()
    events: list[Event] = []
    new = SequenceTracker("s", "p", 8, events.append, lambda after: None, old.tracker)
    new.start()
    new.on_catch_up(CatchUp(1, 1, [b"1"]))
    assert [(event.kind, event.epoch) for event in events] == [("gone", 7), ("event", 8)]


def test_a_replaced_epoch_is_not_reported_again_after_a_reconnect() -> None:
    """The dump of the new epoch replaces the old state. A later repair emits no "gone"."""
    recorder = TrackerRecorder()
    before = SequenceTracker("s", "p", 6, recorder.events.append, recorder.requests.append)
    before.start()
    before.on_catch_up(CatchUp(1, 1, (b"a",), dump=True))
    after = SequenceTracker("s", "p", 7, recorder.events.append, recorder.requests.append, before)
    after.start()
    after.on_catch_up(CatchUp(0, 0, (b"",), dump=True))
    recorder.pop_events()
    after.on_disconnected()
    after.start()
    after.on_catch_up(CatchUp(1, 1, (b"1",)))
    assert recorder.pop_events() == [("stale", 0, b""), ("event", 1, b"1")]
