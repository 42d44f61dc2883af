"""Support for tests of services and operators: a graph within one process, and fakes."""

from dynamo.testing.fakes import CollectedReply
from dynamo.testing.local_graph import LocalGraph, local

__all__ = ["CollectedReply", "LocalGraph", "local"]
