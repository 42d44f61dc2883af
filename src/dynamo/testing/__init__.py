"""What tests of a backend, an engine or an operator need: conformance suites and real fakes.

The suites are in `dynamo.testing.conformance.{discovery,requests,events}`; they need pytest.
"""

from dynamo.testing.local import LocalGraph, local
from dynamo.testing.replies import CollectedReply, ScriptedEngine

__all__ = ["CollectedReply", "LocalGraph", "ScriptedEngine", "local"]
