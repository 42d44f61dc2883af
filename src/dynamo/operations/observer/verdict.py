"""The verdict on a request: which stage took longer than usual, and because of what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from dynamo.operations.observer.causes import (
    MIN_STAGE_US,
    Cause,
    LateRequest,
    explain_loss,
    explain_stage,
)
from dynamo.operations.observer.stages import StageTime, find_stages
from dynamo.operations.observer.surroundings import Surroundings, TypicalTimes
from dynamo.telemetry.story import EndedStory

MIN_LATE_US = 100_000
"""A request that took less than this beyond what is usual was not late."""
LATE_RATIO = 1.5


class RequestVerdict(msgspec.Struct, frozen=True):
    """The causes of a request's lateness or end, the most expensive first, as one sentence."""

    text: str
    causes: Sequence[Cause] = ()

    @property
    def cause(self) -> str:
        """The name of the first cause; "" for a request like others."""
        return self.causes[0].name if self.causes else ""


def judge(
    story: EndedStory, router: str, typical: TypicalTimes, known: Surroundings
) -> RequestVerdict:
    """Return the verdict. `router`: the process that served the request."""
    request = LateRequest(story, router, known, typical.usual_us(story, "load"))
    led_to: Counter[str] = Counter()
    causes = _order(list(_find_causes(request, typical, led_to)), led_to)
    total_s = story.ended_us / 1e6
    if not causes:
        if story.end:
            return RequestVerdict(
                f"ended with {story.end} after {total_s:.3g} s", (_end_cause(story),)
            )
        if not typical.knows(story.model):
            text = f"took {total_s:.3g} s; there were too few requests to know what is usual"
            return RequestVerdict(text)
        return RequestVerdict(f"nothing took longer than usual: {total_s:.3g} s")
    shown = "; ".join(f"{_of(cause, total_s)} {cause.text}" for cause in causes[:3])
    if story.end:
        shown += f"; ended with {story.end}"
        causes.append(_end_cause(story))
    return RequestVerdict(shown, tuple(causes))


def _order(parts: Sequence[Cause], costs: Counter[str]) -> list[Cause]:
    """Return the largest part of each cause, the most expensive cause first, then other parts.
    `costs`: what each has cost by what it led to."""
    largest: dict[str, Cause] = {}
    for cause in sorted(parts, key=lambda cause: -cause.us):
        costs[cause.name] += cause.us
        largest.setdefault(cause.name, cause)
    first = sorted(largest.values(), key=lambda cause: -costs[cause.name])
    return first + [cause for cause in parts if cause is not largest[cause.name]]


def _of(cause: Cause, total_s: float) -> str:
    return f"{cause.us / 1e6:.2g} of {total_s:.2g} s" if cause.us else "0 s"


def _end_cause(story: EndedStory) -> Cause:
    worker = story.attempts[-1].worker if story.attempts else ""
    return Cause(f"ended: {story.end}", 0, "", "", worker)


def _find_causes(
    request: LateRequest, typical: TypicalTimes, led_to: Counter[str]
) -> Iterator[Cause]:
    """Yield what cost time beyond the usual. Time that a cause explains counts once, and in
    `led_to` for the loss that led to it."""
    story = request.story
    usual_us = sum(typical.usual_us(story, name) for name in ("send", "queue", "prefill"))
    for number in request.lost:
        yield from explain_loss(request, number, usual_us)
    whole = StageTime("", 0, story.ended_us)
    unread_us = story.stalled_us - request.paused_us(whole)
    if unread_us >= MIN_LATE_US:
        yield Cause("slow client", unread_us, "the client did not read its answer", "deliver")
    late = list(_find_late(request, typical))
    if sum(us for _, us in late) >= MIN_LATE_US:
        for stage, us in late:
            loss = request.loss_before(stage)
            for cause in explain_stage(request, stage, us):
                led_to[loss] += cause.us if cause.name != loss else 0
                yield cause


def _find_late(request: LateRequest, typical: TypicalTimes) -> Iterator[tuple[StageTime, int]]:
    """Yield each stage that took longer than it should have, and how much. A stage that was late by
    less than half of its usual time counts only if the whole request was late by half."""
    story, missed = request.story, request.missed
    usual_us: dict[str, float] = {}
    late_us: Counter[str] = Counter()
    stages = []
    for stage in find_stages(story):
        name = stage.name
        left_us = usual_us.setdefault(name, typical.usual_us(story, name))
        if request.is_lost(stage):
            continue
        us = max(0, stage.us - int(min(left_us, stage.us)))
        usual_us[name] = max(0.0, left_us - stage.us)
        if name == "deliver":
            us = max(min(us, request.paused_us(stage)), us - story.stalled_us)
        if name == "prefill" and missed is not None and missed.share:
            us = int(stage.us * missed.share)
        late_us[name] += us
        stages.append((stage, us))
    usual = {name: typical.usual_us(story, name) for name in late_us}
    is_late = late_us.total() >= sum(usual.values()) * (LATE_RATIO - 1)
    for stage, us in stages:
        enough_us = 0.0 if is_late else usual[stage.name] * (LATE_RATIO - 1)
        if us and late_us[stage.name] >= max(MIN_STAGE_US, enough_us):
            yield stage, us
