"""A stream whose every event has the usage so far: vLLM's `continuous_usage_stats`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dynamo.application.generation.replies import StreamReply
from dynamo.core.text import TextFinish
from dynamo.core.values import Started


class CountedStreamReply(StreamReply):
    """Writes the tokens so far into each event. The processor counts them for the reply."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tokens: Counter[int] = Counter()

    def begin(self, choice: int, started: Started) -> None:
        super().begin(choice, started)
        self.count_tokens(choice, 0)

    def count_tokens(self, choice: int, tokens: int) -> None:
        if tokens and self._prefixes[choice] is None:
            self._start_choice(choice)  # its event comes before the first token
        self._tokens[choice] += tokens
        prompt, completion = self._usage_counter.prompt_tokens, self._tokens.total()
        usage = self._usage_counter.to_dict() | {
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        self._suffix = self._encoder.show_usage(usage)

    def finish(self, choice: int, end: TextFinish) -> None:
        self.count_tokens(choice, end.completion_tokens - self._tokens[choice])
        super().finish(choice, end)
