"""What one request used."""

from __future__ import annotations

from typing import Any

from dynamo.core.values import Started


class UsageCounter:
    """Counts of one HTTP request. A prompt's `n` choices share its tokens."""

    __slots__ = (
        "_choices_per_prompt",
        "cached_tokens",
        "completion_tokens",
        "prompt_tokens",
        "worker",
    )

    def __init__(self, per_prompt: int) -> None:
        self._choices_per_prompt = per_prompt
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.worker = ""

    def on_started(self, choice: int, started: Started) -> None:
        """A worker took the choice; the first of a prompt says what was cached."""
        if not self.worker:
            self.worker = started.worker
        if choice % self._choices_per_prompt == 0:
            self.cached_tokens += started.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
