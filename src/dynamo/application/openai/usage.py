"""Token usage of one HTTP request."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.text import TextFinish
from dynamo.core.values import Started


class UsageCounter(msgspec.Struct):
    """Counts the tokens of all prompts and choices. The choices of a prompt share its tokens."""

    choices_per_prompt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    worker: str = ""
    prefill_worker: str = ""

    def on_started(self, choice: int, started: Started) -> None:
        """Note the worker of a choice. The first choice of a prompt counts its cached tokens."""
        if not self.worker:
            self.worker, self.prefill_worker = started.worker, started.prefill
        if choice % self.choices_per_prompt == 0:
            self.cached_tokens += started.cached_tokens

    def on_finished(self, end: TextFinish) -> None:
        """Count the tokens of a choice, and those of its prompt that are known only now."""
        self.prompt_tokens += end.prompt_tokens
        self.cached_tokens += end.cached_tokens
        self.completion_tokens += end.completion_tokens
        self.reasoning_tokens += end.reasoning_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage
