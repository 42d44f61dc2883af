"""Publish and forget, numbered: the event plane. Backends: `memory:`, `tcp:`."""

from dynamo.communication.events.plane import (
    Dump,
    Event,
    EventListener,
    Events,
    EventSource,
    open_events,
)

__all__ = ["Dump", "Event", "EventListener", "EventSource", "Events", "open_events"]
