"""Reasoning and tool calls of an answer that is not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ReasoningDelta,
    RefusalDelta,
)

CUT_REASONS = frozenset({"length", "content_filter"})


class PendingCall(msgspec.Struct):
    """A tool call; `complete` once it has ended."""

    id: str
    name: str
    arguments: list[str] = []
    complete: bool = False


class AnswerParts(msgspec.Struct):
    """Collects the events of one choice."""

    reasoning: list[str] = []
    refusal: list[str] = []
    calls: dict[int, PendingCall] = {}

    def add(self, event: AnswerEvent) -> None:
        """Take an event."""
        if isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, RefusalDelta):
            self.refusal.append(event.text)
        elif isinstance(event, CallBegun):
            self.calls[event.index] = PendingCall(event.id, event.name)
        elif isinstance(event, ArgumentsDelta):
            self.calls[event.index].arguments.append(event.text)
        elif isinstance(event, CallEnded):
            self.calls[event.index].complete = True

    def fields(self, reasoning_fields: Sequence[str], reason: str) -> dict[str, Any]:
        """Return the fields of a message besides its text. `reason`: that of the answer's end."""
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields = dict.fromkeys(reasoning_fields, "".join(self.reasoning))
        if self.refusal:
            fields["refusal"] = "".join(self.refusal)
        if calls := self._shown_calls(cut=reason in CUT_REASONS):
            fields["tool_calls"] = calls
        return fields

    def _shown_calls(self, *, cut: bool) -> list[dict[str, Any]]:
        """Return OpenAI's `tool_calls`, also the last one of an answer that was `cut` within it.
        Other calls without an end are text, which follows."""
        last = next(reversed(self.calls.values()), None)
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in self.calls.values()
            if call.complete or (cut and call is last)
        ]
