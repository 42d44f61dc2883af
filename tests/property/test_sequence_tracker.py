"""A tracker behind a wire that drops, doubles and reorders: the listener hears everything once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.communication.events import Event
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import BufferedEventSource

Batch = tuple[int, tuple[bytes, ...]]


async def _nothing() -> None: ...


class Wire:
    """Publisher, a bad wire, tracker. `answer` brings what was asked for last."""

    def __init__(self) -> None:
        self.sent: list[Batch] = []
        self.state: list[bytes] = []
        self.heard: list[bytes] = []
        self.kinds: list[str] = []
        self.asked: int | None = None
        self.outlet = BufferedEventSource(
            lambda: tuple(self.state), lambda _: None, self._sent, _nothing
        )
        self.tracker = SequenceTracker("kv", "w", 1, self._hear, self._ask)
        self.tracker.start()

    def publish(self, payload: bytes) -> None:
        self.state.append(payload)
        self.outlet.publish(payload)
        self.outlet.flush()

    def answer(self) -> None:
        if self.asked is not None:
            after, self.asked = self.asked, None
            self.tracker.on_catch_up(self.outlet.catch_up(after))

    def _sent(self, first: int, payloads: list[bytes]) -> None:
        self.sent.append((first, tuple(payloads)))

    def _ask(self, after: int) -> None:
        self.asked = after

    def _hear(self, event: Event) -> None:
        self.kinds.append(event.kind)
        if event.kind == "dump":
            self.heard = []
        if event.kind in {"dump", "event"} and event.payload:
            self.heard.append(event.payload)


fates = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["pass", "drop", "twice", "late", "answer"])),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(fates)
def test_everything_is_heard_once_and_in_order(todo: list[tuple[int, str]]) -> None:
    wire, late, number = Wire(), [], 0
    for count, fate in todo:
        for _ in range(count):
            number += 1
            wire.publish(b"%d" % number)
        batches, wire.sent = wire.sent, []
        if fate == "late":
            late += batches
            continue
        for batch in [] if fate == "drop" else batches + late:
            wire.tracker.on_events(*batch)
            if fate == "twice":
                wire.tracker.on_events(*batch)
        late = []
        if fate == "answer":
            wire.answer()
        assert wire.heard == [b"%d" % at for at in range(1, len(wire.heard) + 1)]
    wire.tracker.on_skipped(wire.outlet.last_sequence)
    wire.answer()
    assert wire.heard == wire.state
    assert wire.tracker.lost_events == 0
    if "stale" in wire.kinds:
        assert wire.kinds[-1] != "stale"
