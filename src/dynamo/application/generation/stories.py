"""Opens and ends the story of each request that generates text."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dynamo.application.exchange import Exchange
from dynamo.application.items import UsageCounter
from dynamo.core.errors import CANCELLED, error_code
from dynamo.telemetry.story import Story, StoryListener, current_story


class Stories:
    """Tells `listener` the story of each request. `wall` returns the time since 1970."""

    def __init__(self, listener: StoryListener, wall: Callable[[], float]) -> None:
        self._listener = listener
        self._wall = wall

    def begin(
        self, exchange: Exchange, now: float, priority: int, choices: int, prompts: int
    ) -> None:
        """Open the story of a request with so many choices of each prompt."""
        current_story.set(
            Story(
                exchange.request_id,
                exchange.model,
                self._wall(),
                now,
                exchange.request.headers,
                priority,
                choices,
                prompts,
            )
        )

    def end(self, usage: UsageCounter, tokens: int, missing: int, now: float) -> None:
        """Pass the story on. `missing`: choices that did not end. Call while the error of the
        request, if there is one, is handled."""
        story = current_story.get()
        if story is None:
            return
        current_story.set(None)
        story.ended_s, story.output_tokens = now, tokens
        story.prompt_tokens, story.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        error = sys.exc_info()[1]
        if error is not None:
            story.end = error_code(error)
        elif missing:
            story.end = CANCELLED
        self._listener(story)
