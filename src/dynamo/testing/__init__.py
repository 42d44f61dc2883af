"""Support for tests of backends, engines and operators: conformance suites and fakes.

The suites `dynamo.testing.conformance.{discovery,engines,events,requests}` need pytest.
"""

from dynamo.testing.fakes import CollectedReply
from dynamo.testing.local_graph import LocalGraph, local

__all__ = ["CollectedReply", "LocalGraph", "local"]
