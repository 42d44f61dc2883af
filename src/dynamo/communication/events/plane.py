"""The promise of the event plane, and the table of its backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from dynamo.communication.backends import load_backend
from dynamo.communication.directory import Directory
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.plugins import EVENT_BACKENDS

EventKind = Literal["event", "dump", "stale", "repaired", "gone"]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What a listener gets.

    `kind`: "event" = the next one, in order; "dump" = the present state, which replaces all that
    was known of this publisher (its first payload, empty where there is none; further ones follow
    as "event" with the same sequence); "stale" = a gap was noticed and is being repaired (payload
    empty): until the next "event" or "dump", or "repaired" where nothing was missing after all;
    "gone" = the publisher disappeared (payload empty).
    """

    subject: str
    publisher: str
    epoch: int
    sequence: int
    payload: bytes
    kind: EventKind = "event"


EventListener = Callable[[Event], None]
Dump = Callable[[], Sequence[bytes]]
"""Payloads that rebuild the present state from nothing."""


class EventSource(ABC):
    """One publisher of one subject: numbers what it publishes, keeps the last of it for repair."""

    @abstractmethod
    def publish(self, payload: bytes) -> None:
        """Number it and send it to all listeners with this turn of the loop. Never blocks."""

    @abstractmethod
    async def close(self) -> None:
        """Listeners are told "gone"."""


class Events(ABC):
    """Sources and subscriptions. (epoch, sequence): the epoch is new for every Source object."""

    @property
    def connection_error(self) -> str:
        """Why the plane's server cannot be reached now; "" when all is well."""
        return ""

    @abstractmethod
    async def open_source(
        self, subject: str, publisher: str, dump: Dump | None = None, *, latest: bool = False
    ) -> EventSource:
        """Start publishing `subject` as `publisher` (an instance id). With `dump`, late joiners and
        listeners behind an unrepairable gap get the present state. Without it, who joins gets all
        events from the first on while the source still holds them, else only those to come.
        `latest`: every event tells the whole state, so that only the newest is kept, and is the
        dump."""

    @abstractmethod
    async def subscribe(self, prefix: str, listener: EventListener) -> Callable[[], None]:
        """Call `listener`, on the loop, with the events of every source whose subject starts with
        `prefix`, present and future. Per publisher in order, none twice; a gap is repaired from the
        publisher (just the missing range, else its dump). Returns the way to unsubscribe."""

    @abstractmethod
    def count_lost_events(self) -> int:
        """How many events could not be repaired, of all subscriptions (for the metrics)."""

    @abstractmethod
    async def close(self) -> None:
        """Close every source and subscription."""


async def open_events(
    url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
) -> Events:
    """Open a backend by URL; publishers are found through `directory`. Raises `ConfigError`."""
    plane: Events = await load_backend(EVENT_BACKENDS, url).open(url, directory, options)
    return plane
