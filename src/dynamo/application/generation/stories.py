"""Opens and ends the story of each request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import TokenTiming
from dynamo.application.items import UsageCounter
from dynamo.core.clock import Clock
from dynamo.core.errors import CANCELLED, error_code
from dynamo.core.text import TextOptions
from dynamo.telemetry.story import NO_OPTIONS, Story, StoryListener, current_story

log = logging.getLogger(__name__)

TOLD_AT_ONCE = 32
"""So many stories are told in a loop: one by one, the code would have left the CPU's caches."""
MAX_DELAY_S = 0.2
"""An ended story is told within this time."""


class Stories:
    """Tells `listeners` the stories of requests, some at a time."""

    def __init__(self, listeners: Sequence[StoryListener], clock: Clock) -> None:
        self._listeners = listeners
        self._clock = clock
        self._ended: list[Story] = []
        self._cancel_timer: Callable[[], None] = lambda: None

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
            began_s,
            now,
            request.headers,
            options,
            exchange.streaming,
            prompts,
            exchange.trace,
        )
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
        elif (error := sys.exception()) is not None:
            story.end = error_code(error)

    def tell(self, story: Story, now: float) -> None:
        """Pass on a story that ends now."""
        current_story.set(None)
        story.ended_s = now
        error = sys.exception()
        if error is not None:
            story.end = error_code(error)
        ended = self._ended
        ended.append(story)
        if (count := len(ended)) == 1 or count == TOLD_AT_ONCE:
            self._cancel_timer()
            due_s = now if count == TOLD_AT_ONCE else now + MAX_DELAY_S
            self._cancel_timer = self._clock.call_at(due_s, self.flush)

    def flush(self) -> None:
        """Tell the stories that have ended."""
        self._cancel_timer()
        stories, self._ended = self._ended, []
        wall_offset_s = self._clock.wall() - self._clock.now()
        for story in stories:
            story.close(wall_offset_s)
        for listener in self._listeners:
            try:
                listener(stories)
            except Exception:
                log.exception("stories are left out")
        for story in stories:  # an attempt refers to its reply, which refers to the story
            story.attempts.clear()

    def tell_failure(self, exchange: Exchange, now: float) -> None:
        """Tell a request that failed before it had a story."""
        story = self.begin(exchange, now)
        story.end = exchange.error_code
        self.tell(story, now)
