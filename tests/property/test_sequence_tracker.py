"""Property: SequenceTracker emits every event once although batches are lost or reordered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.communication.events import Event
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import BufferedEventSource

Batch = tuple[int, tuple[bytes, ...]]


async def _nothing() -> None: ...


class FaultyChannel:
    """A source and a tracker. `sent` holds batches under way; `answer` delivers a catch-up."""

    def __init__(self) -> None:
        self.sent: list[Batch] = []
        self.state: list[bytes] = []
        self.received: list[bytes] = []
        self.kinds: list[str] = []
        self.requested: int | None = None
        self.source = BufferedEventSource(
            lambda: tuple(self.state), lambda _: None, self._sent, _nothing
        )
        self.tracker = SequenceTracker("kv", "w", 1, self._hear, self._ask)
        self.tracker.start()

    def publish(self, payload: bytes) -> None:
        self.state.append(payload)
        self.source.publish(payload)
        self.source.flush()

    def answer(self) -> None:
        if self.requested is not None:
            after, self.requested = self.requested, None
            self.tracker.on_catch_up(self.source.catch_up(after))

    def _sent(self, first: int, payloads: list[bytes]) -> None:
        self.sent.append((first, tuple(payloads)))

    def _ask(self, after: int) -> None:
        self.requested = after

    def _hear(self, event: Event) -> None:
        self.kinds.append(event.kind)
        if event.kind == "dump":
            self.received = []
        if event.kind in {"dump", "event"} and event.payload:
            self.received.append(event.payload)


fates = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["pass", "drop", "twice", "late", "answer"])),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(fates)
def test_every_event_is_emitted_once_and_in_order(steps: list[tuple[int, str]]) -> None:
    channel, delayed, number = FaultyChannel(), [], 0
    for count, fate in steps:
        for _ in range(count):
            number += 1
            channel.publish(b"%d" % number)
        batches, channel.sent = channel.sent, []
        if fate == "late":
            delayed += batches
            continue
        for batch in [] if fate == "drop" else batches + delayed:
            channel.tracker.on_events(*batch)
            if fate == "twice":
                channel.tracker.on_events(*batch)
        delayed = []
        if fate == "answer":
            channel.answer()
        assert channel.received == [
            b"%d" % position for position in range(1, len(channel.received) + 1)
        ]
    channel.tracker.on_skipped(channel.source.last_sequence)
    channel.answer()
    assert channel.received == channel.state
    assert channel.tracker.lost_events == 0
    if "stale" in channel.kinds:
        assert channel.kinds[-1] != "stale"
