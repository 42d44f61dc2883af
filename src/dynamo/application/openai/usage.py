"""Token usage of one HTTP request."""

from __future__ import annotations

from typing import Any

from dynamo.core.values import Started


class UsageCounter:
    """Counts the tokens of all prompts and choices. The choices of a prompt share its tokens."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.worker = ""

    def on_started(self, choice: int, started: Started) -> None:
        """Note the worker of a choice. The first choice of a prompt counts its cached tokens."""
        if not self.worker:
            self.worker = started.worker
        if choice % self._choices_per_prompt == 0:
            self.cached_tokens += started.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
