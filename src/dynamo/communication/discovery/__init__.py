"""Who is there: the discovery plane. Backends: `memory:`, `file:PATH`."""

from dynamo.communication.discovery.plane import (
    Discovery,
    RecordChange,
    RecordWatch,
    open_discovery,
)

__all__ = ["Discovery", "RecordChange", "RecordWatch", "open_discovery"]
