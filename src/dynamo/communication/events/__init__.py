"""Publish and forget, numbered: the event plane. Backends: `memory:`, `tcp:`."""

from dynamo.communication.events.plane import (
    Dump,
    Event,
    Events,
    Listener,
    Source,
    open_events,
)

__all__ = ["Dump", "Event", "Events", "Listener", "Source", "open_events"]
