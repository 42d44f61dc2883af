"""The discovery plane: records of live processes. Backends: `memory:`, `file:PATH`, `etcd://`."""

from dynamo.communication.discovery.plane import (
    Discovery,
    RecordChange,
    RecordWatch,
    open_discovery,
)

__all__ = ["Discovery", "RecordChange", "RecordWatch", "open_discovery"]
