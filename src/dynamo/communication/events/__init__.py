"""The event plane: numbered publish and subscribe. Backends: `memory:`, `tcp:`, `nats:`."""

from dynamo.communication.events.plane import (
    Dump,
    Event,
    EventListener,
    Events,
    EventSource,
    open_events,
)

__all__ = ["Dump", "Event", "EventListener", "EventSource", "Events", "open_events"]
