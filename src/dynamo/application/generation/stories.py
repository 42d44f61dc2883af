"""Opens and ends the story of each request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import TokenTiming
from dynamo.application.items import UsageCounter
from dynamo.core.errors import CANCELLED, error_code
from dynamo.core.text import TextOptions
from dynamo.telemetry.story import Story, StoryListener, current_story

NO_OPTIONS = TextOptions()


class Stories:
    """Tells `listeners` the story of each request. `wall` returns the time since 1970.
    `keeps_options`: spans are exported, which tell the options of requests."""

    keeps_options = False

    def __init__(self, listeners: Sequence[StoryListener], wall: Callable[[], float]) -> None:
        self._listeners = listeners
        self._wall = wall

    def begin(
        self,
        exchange: Exchange,
        now: float,
        options: TextOptions = NO_OPTIONS,
        prompts: int = 1,
    ) -> Story:
        """Open the story of a request with so many prompts."""
        request, began_s = exchange.request, exchange.started_s or now
        exchange.story = story = Story(
            exchange.request_id,
            exchange.client_request_id,
            request.path,
            exchange.model,
            self._wall() - (now - began_s),
            began_s,
            now,
            request.headers,
            options.priority,
            options.n,
            prompts,
            exchange.trace,
        )
        if self.keeps_options and options is not NO_OPTIONS:
            story.options = options, exchange.streaming
        if exchange.load_s:
            story.limit_s, story.waited_for = exchange.load_s, "model"
        current_story.set(story)
        return story

    def end(
        self,
        exchange: Exchange,
        usage: UsageCounter,
        timing: TokenTiming,
        tokens: int,
        missing: int,
        now: float,
    ) -> None:
        """Pass the story on unless it is held. `missing`: choices that did not end. Call while the
        error of the request, if there is one, is handled."""
        story, response = exchange.story, exchange.response
        if story is None:
            return
        if response.paused_at is not None:
            response.resume(now)
        story.stalled_s = response.paused_s
        story.output_tokens = tokens
        story.first_s, story.gap_s = timing.first_s, timing.longest_gap_s
        story.prompt_tokens, story.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        if missing:
            story.end = CANCELLED
            last_s = max((times[-1] for times in timing.timestamps if times), default=now)
            story.gap_s = max(story.gap_s, now - last_s)
        if not exchange.holds_story:
            self.tell(story, now)
        elif (error := sys.exc_info()[1]) is not None:
            story.end = error_code(error)

    def tell(self, story: Story, now: float) -> None:
        """Pass on a story that ends now."""
        current_story.set(None)
        story.ended_s = now
        error = sys.exc_info()[1]
        if error is not None:
            story.end = error_code(error)
        story.close()
        for listener in self._listeners:
            listener(story)
        story.attempts.clear()

    def tell_failure(self, exchange: Exchange, now: float) -> None:
        """Tell a request that failed before it had a story."""
        story = self.begin(exchange, now)
        story.end = exchange.error_code
        self.tell(story, now)
