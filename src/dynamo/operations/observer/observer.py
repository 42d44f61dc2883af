"""The observer of a deployment: keeps the stories of its requests and answers questions on them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.errors import NotFound, StoreUnavailable
from dynamo.core.kv_events import split_worker_name
from dynamo.core.values import Load
from dynamo.operations.observer.activity import KEPT_S, PaceRecorder, show_workers
from dynamo.operations.observer.cache_misses import explain_misses
from dynamo.operations.observer.explanations import explain_attempt, routing_record
from dynamo.operations.observer.shown import show_slow, show_story
from dynamo.operations.observer.slo_books import SloBooks
from dynamo.operations.observer.stories import KeptStory, StoryStore
from dynamo.operations.observer.surroundings import (
    MAX_PAUSES,
    Surroundings,
    TypicalTimes,
    notes_of,
)
from dynamo.operations.observer.timeline import (
    VIEWS,
    RoutingTimeline,
    series_by_worker,
)
from dynamo.operations.observer.verdict import RequestVerdict, judge
from dynamo.scheduling.router.collector.collector import DecisionCollector, PerformanceReport
from dynamo.telemetry.slo import FAILED
from dynamo.telemetry.story import AttemptFacts, ProcessSample, RouterChoice, StoryBatch

MAX_RECENT_REQUESTS = 50
MAX_LISTED = 200
MAX_MARKS, WORKERS_PER_MARK = 20_000, 8
MAX_CHOICES = 5_000
NOTICED_S = 2.0
"""A plane is known to be away within a second, and said once a second."""
SAMPLE_KEPT_S = 5.0
"""The sample of a process that says nothing for so long does not count."""
HOUR_S = 3_600.0
SLOW_S, MAX_SLOW_SHOWN = 300.0, 20
MAX_BROKEN, MAX_JUDGED = 5_000, 200
USUAL = "usual for the model"
"""The cause of a request that took no longer than others."""


class DeploymentObserver:
    """Receives the batches of all processes. Nothing here may raise for a batch's content."""

    def __init__(self, clock: Clock, books: SloBooks | None = None) -> None:
        """`promise`: the target, and the promised times to the first token and between texts."""
        self._clock = clock
        self.slo_books = books or SloBooks(_no_file, clock.wall)
        self.promise = (0.999, 5.0, 2.0)
        self.listeners: list[Callable[[KeptStory], None]] = []
        self._broken: deque[KeptStory] = deque(maxlen=MAX_BROKEN)
        self.stories = StoryStore()
        self.collector = DecisionCollector(wall=clock.wall)
        self._routed: Counter[str] = Counter()
        self._timeline = RoutingTimeline(self._routed)
        self._typical = TypicalTimes()
        self._known = Surroundings()
        self._marks: OrderedDict[tuple[str, int], deque[tuple[int, str, float]]] = OrderedDict()
        self._known.marks = self._marks
        self._choices: OrderedDict[tuple[str, int, str], tuple[str, RouterChoice]] = OrderedDict()
        self._pace = PaceRecorder()
        self._loads: Mapping[str, Load] = {}
        self._views: Mapping[str, str] = {}
        self._waiting = 0
        self._samples: dict[str, tuple[float, ProcessSample]] = {}
        self.received = self.dropped = 0

    def on_batch(self, batch: StoryBatch) -> None:
        """Take over what a process has published."""
        self.received += len(batch.stories)
        self.dropped += batch.dropped
        for choice in batch.choices:
            key = (choice.request_id, choice.attempt.choice, choice.attempt.worker)
            self._choices[key] = (batch.process, choice)
            if len(self._choices) > MAX_CHOICES:
                self._choices.popitem(last=False)
        if batch.pauses:
            pauses = notes_of(self._known.pauses, batch.process, MAX_PAUSES)
            pauses.extend(batch.pauses)
        for why in batch.planes.values():
            self._known.planes.append((batch.wall_s - NOTICED_S, batch.wall_s, batch.process, why))
        if batch.sample is not None:
            self._samples[batch.process] = (self._clock.now(), batch.sample)
        self.slo_books.add(batch.process, batch.slo)
        for story in batch.stories:
            self._add_story(KeptStory(story, batch.process))

    def on_process_gone(self, process: str) -> None:
        """Forget the sample of a process that has ended."""
        self._samples.pop(process, None)
        self.slo_books.forget(process)

    def _add_story(self, entry: KeptStory) -> None:
        story = entry.story
        self.stories.add(entry)
        for listener in self.listeners:
            listener(entry)
        if story.slo >= FAILED:
            self._broken.append(entry)
        self._pace.add(story)
        self._typical.add(story)
        self._known.add_prefills(story)
        self._known.add_moves(story)
        self._known.add_answers(story)
        for attempt in story.attempts:
            self._routed[attempt.worker] += 1
        for _, facts in self._decided(entry):
            self.collector.record(routing_record(story, facts))
        if story.attempts and story.prompt_mark:
            key = story.model, story.prompt_mark
            entries = self._marks.setdefault(key, deque(maxlen=WORKERS_PER_MARK))
            entries.append((story.salt_mark, story.attempts[0].worker, story.wall_s))
            self._marks.move_to_end(key)
            if len(self._marks) > MAX_MARKS:
                self._marks.popitem(last=False)

    def _decided(self, entry: KeptStory) -> Iterator[tuple[str, AttemptFacts]]:
        """Yield each attempt with the process that chose, which tells the costs."""
        for facts in entry.story.attempts:
            key = entry.story.request_id, facts.choice, facts.worker
            router, choice = self._choices.get(key, (entry.process, None))
            if choice is None or facts.costs:
                yield entry.process, facts
            else:
                yield router, replace(facts, costs=choice.attempt.costs)

    def sample(self, loads: dict[str, Load]) -> None:
        """Add a sample of all workers. `loads`: their last reports."""
        oldest_s = self._clock.now() - SAMPLE_KEPT_S
        samples = [each for at_s, each in self._samples.values() if at_s >= oldest_s]
        sent: Counter[str] = Counter()
        views: dict[str, str] = {}
        for each in samples:
            sent.update(each.sent)
            for name, view in each.views.items():
                instance, _ = split_worker_name(name)
                views[instance] = max(views.get(instance, view), view, key=VIEWS.index)
        workers = sorted({*loads, *sent})
        self._known.add_loads(loads, self._clock.wall())
        self.collector.workers = len(workers)
        self._loads, self._waiting = loads, sum(each.waiting for each in samples)
        self._views = views
        at = float(round(self._clock.wall()))
        self._timeline.record(at, workers, loads, sent, views=views, waiting=self._waiting)

    def show_activity(self, seconds: float) -> Mapping[str, Any]:
        """Return what the deployment does now, with the pace of the last `seconds` and the slowest
        requests of the last minutes. `waiting`: requests held in its routers."""
        now = self._clock.wall()
        recent = self.stories.select(lambda entry: entry.story.wall_s >= now - SLOW_S)
        recent.sort(key=lambda entry: (entry.story.slo < FAILED, -entry.story.ended_us))
        pace = self._pace.show(now, min(KEPT_S, max(1, int(seconds))))
        return {
            "at": now,
            "waiting": self._waiting,
            "workers": show_workers(self._loads, self._routed, self._views),
            "pace": pace,
            "slow": [show_slow(entry, self._judge(entry)) for entry in recent[:MAX_SLOW_SHOWN]],
        }

    def explain(self, request_id: str) -> list[Mapping[str, Any]]:
        """Return the decisions for a request, oldest first; "" stands for the latest requests."""
        if request_id:
            entries = self.stories.find(request_id)[:1]
        else:
            entries = self.stories.all()[:MAX_RECENT_REQUESTS][::-1]
        return [
            explain_attempt(entry.story, router, facts)
            for entry in entries
            for router, facts in self._decided(entry)
        ]

    async def report(self, seconds: float | None = None) -> PerformanceReport:
        """Return a report on the last `seconds`, or on all records."""
        return await self._clock.offload(self.collector.report, seconds)

    async def timeline(
        self, since: float = 0.0, seconds: float | None = None, worker: str = "", columns: str = ""
    ) -> Mapping[str, Any]:
        """Return the samples of all workers after a Unix time, or of the last `seconds`; only those
        of a `worker`, only some `columns`."""
        after = since if seconds is None else max(since, self._clock.wall() - seconds)
        read = self._timeline.samples_since
        return await self._clock.offload(lambda: series_by_worker(read(after), worker, columns))

    def find(self, name: str, *, maybe: bool = False) -> list[Mapping[str, Any]]:
        """Return the stories of a request id, the client's or ours, or of a trace. Raises
        `NotFound` unless there are `maybe` none."""
        stories = self.stories.find(name)
        if not stories and not maybe:
            raise NotFound(
                f"no story of request {name[:100]!r} is kept",
                hint="use the answer's x-request-id or the trace id; a request is told two seconds "
                "after its end; the last 2,000 are kept, those that failed, moved or were slow "
                "longer",
            )
        return [self._show(entry) for entry in stories]

    def list_stories(
        self, slow: float = 0.0, *, failed: bool = False, worker: str = "", limit: int = MAX_LISTED
    ) -> list[Mapping[str, Any]]:
        """Return the newest stories, at most `limit`: those of at least `slow` seconds, those that
        `failed`, those that were at `worker`, by its id or name."""

        def is_wanted(entry: KeptStory) -> bool:
            story = entry.story
            if story.ended_us < slow * 1e6 or (failed and not story.end):
                return False
            attempts = story.attempts
            names = (name for each in attempts for name in (each.worker, each.prefill_worker))
            return not worker or any(
                name == worker or name.startswith(f"{worker}-") for name in names
            )

        return [self._show(entry) for entry in self.stories.select(is_wanted)[:limit]]

    def group_causes(self, seconds: float = HOUR_S) -> list[Mapping[str, Any]]:
        """Return the late and failed requests of the last `seconds`, grouped by first cause, the
        most expensive group first: how many, what they cost in all, and the worst one."""
        since = self._clock.wall() - seconds
        groups: dict[str, list[tuple[RequestVerdict, KeptStory]]] = {}
        for entry in self.stories.select(lambda entry: entry.story.wall_s >= since):
            verdict = self._judge(entry)
            if verdict.cause:
                groups.setdefault(verdict.cause, []).append((verdict, entry))
        shown = []
        for cause, members in groups.items():
            firsts = [verdict.causes[0] for verdict, _ in members]
            workers = Counter(first.worker for first in firsts if first.worker)
            _, worst = max(members, key=lambda member: member[0].causes[0].us)
            group = {
                "cause": cause,
                "requests": len(members),
                "seconds": sum(first.us for first in firsts) / 1e6,
                "workers": dict(workers.most_common()),
                "worst": self._show(worst),
            }
            shown.append(group)
        return sorted(shown, key=lambda group: (-group["seconds"], -group["requests"]))

    def find_causes(self) -> None:
        """Note the causes of requests that broke a promise, at most so many at a time. By now, the
        stories of other requests have come that explain them."""
        for _ in range(min(len(self._broken), MAX_JUDGED)):
            entry = self._broken.popleft()
            cause = self._judge(entry).cause or USUAL
            self.slo_books.add_cause(entry.story.model, cause)

    async def report_slo(self) -> Mapping[str, Any]:
        """Return how the promise was kept. Raises `StoreUnavailable`."""
        self.find_causes()
        return await self._clock.offload(self.slo_books.report, *self.promise)

    def _judge(self, entry: KeptStory) -> RequestVerdict:
        story = replace(entry.story, attempts=[facts for _, facts in self._decided(entry)])
        return judge(story, entry.process, self._typical, self._known)

    def _show(self, entry: KeptStory) -> Mapping[str, Any]:
        missed = explain_misses(entry.story, self._known.marks)
        return show_story(entry, self._judge(entry), missed)


def _no_file() -> Path:
    raise StoreUnavailable("no file for the counts of requests is set")
