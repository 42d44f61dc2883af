"""The reply of conversations in a terminal: reasoning is shown, and not part of the answer."""

from __future__ import annotations

from dynamo.core.text import ReasoningDelta, TextFinish
from dynamo.services.deployment.conversation import CollectedTextReply


def test_reasoning_is_written_before_the_answer() -> None:
    written: list[str] = []
    reply = CollectedTextReply(written.append)
    reply.event(0, ReasoningDelta("Let me "))
    reply.event(0, ReasoningDelta("see."))
    reply.text(0, "It ")
    reply.text(0, "is.")
    reply.finish(0, TextFinish("stop", 4))
    assert "".join(written) == "Let me see.\n\nIt is."
    assert "".join(reply.parts) == "It is."
