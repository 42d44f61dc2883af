"""Publishes the stories of a process once a second, as one event."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Raw

from dynamo.application.frontend_metrics import FrontendMetrics, ModelMetrics
from dynamo.communication.events import EventSource
from dynamo.core.text import TextOptions
from dynamo.core.values import GenerateRequest
from dynamo.operations.observer.stages import STAGES, stage_durations
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.policy import Decision
from dynamo.services.observing.slo_counter import SloCounter
from dynamo.telemetry.story import (
    NO_OPTIONS,
    STORIES_SUBJECT,
    US_PER_S,
    AttemptFacts,
    EndedStory,
    ProcessSample,
    RouterChoice,
    Story,
    StoryBatch,
    encode_batch,
    encode_story_into,
)

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
ARRAY_32 = b"\xdd"
"""MessagePack's code of an array with a length of 32 bits."""
MAX_STORIES = 500
"""Stories of good requests beyond so many in a batch are left out, and counted."""
MAX_KEPT_BYTES = 1 << 20
"""Batches of this size are kept for an observer whose connection broke."""
MAX_TABLES = 32
"""The costs of all candidates are sent of so many requests in a batch: they take 20 us each."""
LATE_US = 5_000_000
"""A request that took longer is not left out."""
EXEMPLAR_CHARACTERS = 128
"""OpenMetrics allows so many in the names and values of an exemplar; scrapers may refuse all
metrics if there are more. An id that a client has given may have as many."""


class StoryPublisher:
    """Collects stories (`add` is a `StoryListener`) and the choices of a router process.
    `sample` returns what the process knows of its workers. `metrics` are those of a frontend.
    `exports`: spans are exported, which tell the options of requests."""

    exports = False

    def __init__(
        self,
        runtime: DistributedRuntime,
        sample: Callable[[], ProcessSample | None],
        metrics: FrontendMetrics | None = None,
    ) -> None:
        self._runtime = runtime
        self._sample = sample
        self._metrics = metrics
        self._packed = bytearray()
        self._stories = self._good = self._tables = 0
        self._counts: dict[str, _ModelCounts] = {}
        self._choices: deque[RouterChoice] = deque(maxlen=MAX_STORIES)
        self._source: EventSource
        served = {} if metrics is None else metrics.models
        self._slo = SloCounter(runtime.settings, runtime.metrics, served)
        runtime.on_settings_change(self._slo.update_settings)
        self._dropped = runtime.metrics.counter(
            "dynamo_stories_dropped_total",
            "Stories of requests that were not sent to the observer: too_many good ones in a "
            "second, not_packed because of a fault, not_sent because the event plane refused them",
            ("why",),
            known=("too_many", "not_packed", "not_sent"),
        )

    async def start(self) -> None:
        """Publish until the runtime shuts down."""
        runtime = self._runtime
        subject = f"{runtime.settings.runtime.namespace}.{STORIES_SUBJECT}"
        self._source = await runtime.events.open_source(
            subject, runtime.instance_id, max_bytes=MAX_KEPT_BYTES
        )
        runtime.tasks.start(self._run(), "stories")

    def add(self, stories: Sequence[Story]) -> None:
        """Judge, count and pack stories that have ended."""
        count, metrics, packed = self._slo.count, self._metrics, self._packed
        for live in stories:
            story = live.ended
            if story is None:
                continue
            attempts, model = story.attempts, story.model
            moved = len(attempts) > story.choices * story.prompts
            matters = count(story) or moved or story.end != "" or story.ended_us > LATE_US
            self._good += not matters
            if metrics is not None and model in metrics.models:
                counts = self._counts.get(model)
                if counts is None:
                    counts = self._counts[model] = _ModelCounts(metrics.models[model])
                counts.add(story)
                if matters or self._good <= MAX_TABLES:
                    _set_exemplars(counts.metrics, story)
            if self._good > MAX_STORIES and not matters:
                continue
            if self.exports and (matters or story.trace) and live.options is not NO_OPTIONS:
                story.options = _list_options(live.options, live.streaming)
            self._tables += bool(attempts)
            for attempt in attempts:
                if self._tables <= MAX_TABLES:
                    _fill_costs(attempt, keep=True)
                else:
                    attempt.costs = ()
            size_bytes = len(packed)
            try:
                encode_story_into(story, packed, -1)
            except Exception:
                del packed[size_bytes:]
                self._dropped.labels("not_packed").inc()
                log.exception("a story is left out")
                continue
            self._stories += 1

    def add_choice(self, request: GenerateRequest, decision: Decision) -> None:
        """Add the choice of a router process, which sends no requests itself."""
        wall_s, placed = self._runtime.clock.wall(), decision.placement
        predicted_s = decision.predicted_ttft_s
        attempt = AttemptFacts(
            request.choice,
            decision.worker,
            decision.prefill_worker,
            decision.mode,
            decision.view,
            decision.candidates,
            0,
            decision.waited_s * US_PER_S,
            None,
            0,
            "",
            "",
            request.resumed,
            placed.load if placed is not None else 0,
            decision.queue_length,
            placed.prompt_tokens if placed is not None else 0,
            decision.prompt_blocks,
            decision.overlap_blocks,
            decision.best_overlap_blocks,
            None,
            0,
            0,
            decision.waited_s * US_PER_S,
            None if predicted_s is None else predicted_s * US_PER_S,
            decision.harm_weight,
            decision.itl_slo_ms,
            None,
            decision.cost_table,
        )
        self._choices.append(RouterChoice(request.request_id, wall_s, attempt))

    async def _run(self) -> None:
        clock = self._runtime.clock
        while True:
            await clock.sleep(INTERVAL_S)
            try:
                self.publish()
            except Exception:
                log.exception("stories were not published")

    async def close(self) -> None:
        """Publish the last stories."""
        self.publish()
        await self._source.close()

    def publish(self) -> None:
        """Publish what has come since the last call."""
        runtime = self._runtime
        for counts in self._counts.values():
            counts.finish()
        stories: Any = Raw(ARRAY_32 + self._stories.to_bytes(4, "big") + self._packed)
        dropped = max(0, self._good - MAX_STORIES)
        if dropped:
            self._dropped.labels("too_many").inc(dropped)
        count = self._stories
        self._packed, self._counts = bytearray(), {}
        self._stories = self._good = self._tables = 0
        choices = list(self._choices)
        self._choices.clear()
        for number, choice in enumerate(choices):
            _fill_costs(choice.attempt, keep=number < MAX_TABLES)
        pauses = list(runtime.loop_pauses)
        runtime.loop_pauses.clear()
        batch = StoryBatch(
            runtime.instance_id,
            runtime.clock.wall(),
            stories,
            choices,
            dropped,
            pauses,
            dict(runtime.unreachable_planes()),
            self._sample(),
            self._slo.sums(),
        )
        try:
            self._source.publish(encode_batch(batch))
        except Exception:
            self._dropped.labels("not_sent").inc(count)
            raise


class _ModelCounts:
    """The stories of one model in a batch, for its metrics."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self.metrics = metrics
        self._stages: list[Sequence[float]] = []
        self._gaps_us: list[float] = []

    def add(self, story: EndedStory) -> None:
        """Add a story."""
        self._stages.append(stage_durations(story))
        if story.output_tokens > 1:
            self._gaps_us.append(story.gap_us)
        for attempt in story.attempts:
            if attempt.times is not None and attempt.times.recomputed_tokens:
                self.metrics.recomputed_tokens.inc(attempt.times.recomputed_tokens)

    def finish(self) -> None:
        """Count the stories."""
        stages = self.metrics.stages
        for name, column in zip(STAGES, zip(*self._stages, strict=True), strict=False):
            stages[name].observe_all(filter(None, column), US_PER_S)
        self.metrics.longest_gap.observe_all(self._gaps_us, US_PER_S)


def _set_exemplars(metrics: ModelMetrics, story: EndedStory) -> None:
    """Name a story at the buckets that it is in."""
    first_us = story.first_us
    labels = {"trace_id": story.trace} if story.trace else {}
    named = labels | {"request_id": story.request_id}
    if sum(map(len, (*named, *named.values()))) <= EXEMPLAR_CHARACTERS:
        labels = named
    exemplar = labels, story.wall_s + story.ended_us * 1e-6
    metrics.duration.set_exemplar(story.ended_us * 1e-6, exemplar)
    if first_us is not None:
        metrics.time_to_first_token.set_exemplar(first_us * 1e-6, exemplar)
    if story.output_tokens > 1:
        metrics.longest_gap.set_exemplar(story.gap_us * 1e-6, exemplar)


def _fill_costs(attempt: AttemptFacts, *, keep: bool) -> None:
    """Replace the function that builds the cost table by the table."""
    attempt.costs = tuple(attempt.costs()) if keep and callable(attempt.costs) else ()


_get_sampling = attrgetter(
    *("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
)


def _list_options(options: TextOptions, streaming: bool) -> tuple[Any, ...]:
    """Return the values of `EndedStory.options`."""
    sampling = _get_sampling(options.sampling)
    return (options.max_tokens, *sampling, options.stop or None, streaming or None)
