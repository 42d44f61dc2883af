"""Who is there: the discovery plane. Backends: `memory:`, `file:PATH`."""

from dynamo.communication.discovery.plane import Change, Discovery, Watch, open_discovery

__all__ = ["Change", "Discovery", "Watch", "open_discovery"]
