"""What tests of a backend, an engine or an operator need: conformance suites and real fakes.

The suites are in `dynamo.testing.conformance.{discovery,requests,events}`; they need pytest.
"""

from dynamo.testing.fakes import CollectedReply, ScriptedEngine
from dynamo.testing.local_graph import LocalGraph, local

__all__ = ["CollectedReply", "LocalGraph", "ScriptedEngine", "local"]
