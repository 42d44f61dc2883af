"""The interface of the event plane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from dynamo.communication.backends import load_backend
from dynamo.communication.directory import Directory
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.plugins import EVENT_BACKENDS

EventKind = Literal["event", "dump", "stale", "repaired", "gone"]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """An event as a listener receives it. `kind` is one of:

    - "event": the next event in order.
    - "dump": the first payload of the publisher's current state, b"" if that is empty. The listener
      drops all earlier state. Further payloads follow as "event" with the same sequence.
    - "stale": events are missing and are being repaired. The payload is empty. The next "event",
      "dump" or "repaired" ends this state.
    - "repaired": no events were missing after all. The payload is empty.
    - "gone": the publisher disappeared. The payload is empty.
    """

    subject: str
    publisher: str
    epoch: int
    sequence: int
    payload: bytes
    kind: EventKind = "event"


EventListener = Callable[[Event], None]
MAX_RING_BYTES: Final = 8 << 20
Dump = Callable[[], Sequence[bytes]]
"""Returns payloads that rebuild the publisher's current state from nothing."""


class EventSource(ABC):
    """Publishes numbered events of one publisher on one subject and keeps the last for repair."""

    @abstractmethod
    def publish(self, payload: bytes) -> None:
        """Send an event to all listeners in the next iteration of the loop. Never blocks."""

    @abstractmethod
    async def close(self) -> None:
        """Close the source. Listeners receive "gone"."""


class Events(ABC):
    """Opens sources and subscriptions. Each source has its own epoch; sequences start at 1."""

    @property
    def connection_error(self) -> str:
        """The reason why the plane's server is unreachable now, or ""."""
        return ""

    @abstractmethod
    async def open_source(
        self,
        subject: str,
        publisher: str,
        dump: Dump | None = None,
        *,
        latest: bool = False,
        max_bytes: int = MAX_RING_BYTES,
    ) -> EventSource:
        """Start publishing `subject` as `publisher` (an instance id).

        With `dump`, new listeners and listeners with a gap that cannot be repaired get the current
        state. Without it, new listeners get all events if the source still holds the first one,
        else only future ones. `latest` means that each event holds the whole state: only the newest
        is kept, and serves as the dump. `max_bytes` of events are kept for listeners with a gap.
        """

    @abstractmethod
    async def subscribe(self, prefix: str, listener: EventListener) -> Callable[[], None]:
        """Call `listener` on the loop with the events of all subjects that start with `prefix`.

        Events of a publisher arrive in order and none twice. A gap is repaired with the missing
        range from the publisher, or with its dump. Returns a function that unsubscribes.
        """

    @abstractmethod
    def count_lost_events(self) -> int:
        """Return how many events of all subscriptions could not be repaired."""

    @abstractmethod
    async def close(self) -> None:
        """Close every source and subscription."""


async def open_events(
    url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
) -> Events:
    """Open a backend by URL. `directory` is where publishers are found. Raises `ConfigError`."""
    plane: Events = await load_backend(EVENT_BACKENDS, url).open(url, directory, options)
    return plane
