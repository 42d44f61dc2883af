"""Support for tests of services, engines and operators: local graphs, fakes, the engines' suite.

The suite `dynamo.testing.conformance.engines` needs pytest.
"""

from dynamo.testing.fakes import CollectedReply
from dynamo.testing.local_graph import LocalGraph, local

__all__ = ["CollectedReply", "LocalGraph", "local"]
