"""The verdict on a request: which stage took longer than usual, and because of what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from dynamo.operations.observer.cache_misses import explain_misses
from dynamo.operations.observer.stages import UNKNOWN, StageTime, find_stages, slowest_attempts
from dynamo.operations.observer.surroundings import (
    LONG_PROMPT_TOKENS,
    Surroundings,
    TypicalTimes,
    name_of_loss,
)
from dynamo.telemetry.story import AttemptFacts, EndedStory

MIN_LATE_US = 100_000
"""A request that took less than this beyond what is usual was not late."""
MIN_STAGE_US = 20_000
LATE_RATIO = 1.5
PAUSE_SHARE = 0.5
MIN_MOVES = 3
"""So many requests that move to a worker at once slow the others there."""


class Cause(msgspec.Struct, frozen=True):
    """Why a request took longer, or failed. `name`: a word for groups. `us`: what it cost."""

    name: str
    us: int
    text: str
    stage: str = ""
    worker: str = ""


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
    judging = _Judging(story, router, typical, known)
    causes = sorted(judging.find_causes(), key=lambda cause: -cause.us)
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


def _of(cause: Cause, total_s: float) -> str:
    return f"{cause.us / 1e6:.2g} of {total_s:.2g} s" if cause.us else "0 s"


def _end_cause(story: EndedStory) -> Cause:
    worker = story.attempts[-1].worker if story.attempts else ""
    return Cause(f"ended: {story.end}", 0, "", "", worker)


class _Judging:
    """The causes of one request."""

    def __init__(
        self, story: EndedStory, router: str, typical: TypicalTimes, known: Surroundings
    ) -> None:
        self._story, self._router = story, router
        self._typical, self._known = typical, known
        self._attempts = slowest_attempts(story)
        self._missed = explain_misses(story, known.marks)
        self._rules: Mapping[str, Callable[[StageTime, int], Cause | None]] = {
            "admit": self._admission,
            "place": self._placement,
            "queue": self._queue,
            "transfer": self._transfer,
            "prefill": self._prefill,
            "decode": self._decode,
        }

    def find_causes(self) -> Iterator[Cause]:
        """Yield what cost time beyond the usual. Time that a cause explains counts once."""
        lost = [number for number, each in enumerate(self._attempts[:-1]) if each.error]
        last = self._attempts[-1] if self._attempts else None
        if last is not None and last.error and last.error != "cancelled":
            lost.append(len(self._attempts) - 1)
        for number in lost:
            yield self._lost_attempt(number)
        if self._story.stalled_us >= MIN_LATE_US:
            text = "the client did not read its answer"
            yield Cause("slow client", self._story.stalled_us, text, "deliver")
        sums: dict[str, StageTime] = {}
        for stage in find_stages(self._story):
            if stage.attempt in lost or (stage.name == "place" and stage.attempt and lost):
                continue
            before = sums.get(stage.name, stage._replace(us=0))
            sums[stage.name] = stage._replace(us=stage.us + before.us, began_us=before.began_us)
        late = [(stage, self._late_us(stage)) for stage in sums.values()]
        if sum(us for _, us in late) >= MIN_LATE_US:
            yield from (self._explain(stage, us) for stage, us in late if us)

    def _late_us(self, stage: StageTime) -> int:
        """Return how much longer a stage took than it should have, 0 for a little."""
        usual_us = self._typical.usual_us(self._story, stage.name)
        late_us = max(0, stage.us - int(min(usual_us, stage.us)))
        if stage.name == "deliver":
            late_us -= self._story.stalled_us
        if stage.name == "prefill" and self._missed is not None and self._missed.share:
            return int(stage.us * self._missed.share)
        return late_us if late_us >= max(MIN_STAGE_US, usual_us * (LATE_RATIO - 1)) else 0

    def _explain(self, stage: StageTime, late_us: int) -> Cause:
        paused = self._pause(stage, late_us)
        if paused is not None:
            return paused
        if (moves := self._moves_beside(stage, late_us)) is not None:
            return moves
        rule = self._rules.get(stage.name)
        cause = rule(stage, late_us) if rule is not None else None
        return cause or self._away_plane(stage, late_us) or self._unexplained(stage, late_us)

    def _lost_attempt(self, number: int) -> Cause:
        attempt = self._attempts[number]
        following = self._attempts[number + 1 : number + 2]
        until_us = following[0].placed_us if following else self._story.ended_us
        # Tokens came until the worker failed: only the time after the last one is lost.
        began_us = attempt.placed_us
        if attempt.first_us is not None:
            began_us = max(began_us, until_us - max(self._story.gap_us, 0))
        worker, reason, name = (
            attempt.worker,
            attempt.reason or attempt.error,
            name_of_loss(attempt),
        )
        if (away := self._plane_between(began_us, until_us)) is not None:
            name, reason = "plane away", f"{reason}, while a plane was away: {away}"
        moved = f", and it went on at {following[0].worker}" if following else ""
        at = f" at token {following[0].resumed}" if following and following[0].resumed else ""
        text = f"were lost with {worker}{at}: {reason}{moved}"
        return Cause(name, until_us - began_us, text, "place", worker)

    def _pause(self, stage: StageTime, late_us: int) -> Cause | None:
        began_s = self._story.wall_s + stage.began_us / 1e6
        ended_s = began_s + stage.us / 1e6
        process = self._router
        worker = self._worker(stage)
        for name in dict.fromkeys((process, worker)):
            paused_s = sum(
                max(0.0, min(ended_s, at_s) - max(began_s, at_s - seconds))
                for at_s, seconds in self._known.pauses.get(name, ())
            )
            if paused_s * 1e6 >= late_us * PAUSE_SHARE:
                text = f"the event loop of {name} stood still in stage {stage.name}"
                return Cause("stalled loop", late_us, text, stage.name, name)
        return None

    def _moves_beside(self, stage: StageTime, late_us: int) -> Cause | None:
        """Blame the loss of another worker if its requests came to that of a slow stage."""
        worker, began_s = self._worker(stage), self._story.wall_s + stage.began_us / 1e6
        ended_s = began_s + stage.us / 1e6
        moves = [
            (lost, name)
            for since_s, until_s, lost, name in self._known.moves.get(worker, ())
            if since_s < ended_s and until_s > began_s and lost != worker
        ]
        if len(moves) < MIN_MOVES:
            return None
        lost, name = moves[-1]
        text = f"in stage {stage.name} at {worker}, to which {len(moves)} requests of {lost} moved"
        return Cause(name, late_us, text, stage.name, lost)

    def _away_plane(self, stage: StageTime, late_us: int) -> Cause | None:
        why = self._plane_between(stage.began_us, stage.began_us + stage.us)
        if why is None:
            return None
        text = f"in stage {stage.name} while a plane was away: {why}"
        return Cause("plane away", late_us, text, stage.name)

    def _plane_between(self, began_us: int, ended_us: int) -> str | None:
        """Return why a plane was away for the process in that time; None if none was."""
        began_s, ended_s = (self._story.wall_s + us / 1e6 for us in (began_us, ended_us))
        for since_s, until_s, process, why in self._known.planes:
            if since_s < ended_s and until_s > began_s and process == self._router:
                return why
        return None

    def _unexplained(self, stage: StageTime, late_us: int) -> Cause:
        worker = self._worker(stage)
        at = f" at {worker}" if worker else ""
        text = f"in stage {stage.name}{at}, unexplained"
        if stage.name == UNKNOWN:
            text = f"until the first token{at}, whose engine does not tell its times"
        return Cause(f"unexplained: {stage.name}", late_us, text, stage.name, worker)

    def _admission(self, stage: StageTime, late_us: int) -> Cause | None:
        story = self._story
        ahead = f", behind {story.ahead} requests" if story.ahead else ""
        texts = {
            "model": "waited for the model to be loaded",
            "limit": "waited for server.max_concurrent_requests",
            "start": "waited for a worker to start",
            "slot": f"waited for a free slot at a worker{ahead}",
        }
        text = texts.get(story.waited_for)
        if text is None:
            return None
        name = {"model": "model load", "start": "worker start"}.get(story.waited_for, "overload")
        return Cause(name, late_us, text, stage.name)

    def _placement(self, stage: StageTime, late_us: int) -> Cause | None:
        attempt = self._attempt(stage)
        if attempt is None or attempt.waited_us < late_us * PAUSE_SHARE:
            return None
        if (tokens := self._prefill_beside(stage, late_us, attempt.worker)) is not None:
            text = (
                f"held by the router while {attempt.worker} computed {_count(tokens)} prompt tokens"
            )
            return Cause("long prompt ahead", late_us, text, stage.name, attempt.worker)
        text = f"held by the router for a better moment, with {attempt.queue_length} more"
        return Cause("overload", late_us, text, stage.name)

    def _queue(self, stage: StageTime, late_us: int) -> Cause | None:
        attempt = self._attempt(stage)
        times = None if attempt is None else attempt.times
        if attempt is None or times is None:
            return None
        requests, tokens = times.ahead_requests or 0, times.ahead_tokens or 0
        worker = attempt.worker
        if attempt.prefill_worker and (times.peer_queue_s or 0.0) * 1e6 > stage.us / 2:
            worker = attempt.prefill_worker
        longest = times.ahead_longest or 0
        is_long = longest >= LONG_PROMPT_TOKENS and longest * 2 >= tokens
        text = f"waited at {worker} behind {requests} requests with {_count(tokens)} prompt tokens"
        text += self._alternative(attempt)
        return Cause("long prompt ahead" if is_long else "overload", late_us, text, "queue", worker)

    def _alternative(self, attempt: AttemptFacts) -> str:
        """Say what the router knew of another worker that would have been quicker."""
        others = [row for row in attempt.cost_table() if row.worker != attempt.worker]
        if not others or attempt.predicted_us is None:
            return ""
        best = others[0]
        held = f"held {best.overlap_blocks} blocks of the prompt"
        if not best.overlap_blocks:
            held = "held none of the prompt"
        return f"; {best.worker} was predicted to cost {best.cost / 1e3:.2g} s and {held}"

    def _transfer(self, stage: StageTime, late_us: int) -> Cause | None:
        attempt = self._attempt(stage)
        if attempt is None or attempt.times is None:
            return None
        source = attempt.times.kv_from
        if source in ("", "peer"):
            name = attempt.prefill_worker or "another worker"
            text = f"waited at {attempt.worker} for KV blocks of {name}"
            return Cause("slow transfer", late_us, text, stage.name, attempt.worker)
        text = f"waited at {attempt.worker} for KV blocks of its tier {source}"
        return Cause("slow tier", late_us, text, stage.name, attempt.worker)

    def _prefill(self, stage: StageTime, late_us: int) -> Cause | None:
        attempt = self._attempt(stage)
        missed = self._missed
        if attempt is None or missed is None:
            return None
        uncached = attempt.prompt_tokens - attempt.cached_tokens
        tokens, ahead = _count(uncached), attempt.times and attempt.times.ahead_requests
        if not missed.share and uncached < LONG_PROMPT_TOKENS:
            if not ahead:
                return None
            text = f"computing {tokens} prompt tokens at {attempt.worker} beside {ahead} requests"
            return Cause("overload", late_us, text, stage.name, attempt.worker)
        text = f"computing {tokens} prompt tokens at {attempt.worker}: {missed.reason}"
        return Cause(missed.name, late_us, text, stage.name, attempt.worker)

    def _decode(self, stage: StageTime, late_us: int) -> Cause | None:
        attempt = self._attempt(stage)
        if attempt is None:
            return None
        if (tokens := self._prefill_beside(stage, late_us, attempt.worker)) is not None:
            text = f"decoding at {attempt.worker} beside {_count(tokens)} prompt tokens of others"
            return Cause("long prompt ahead", late_us, text, stage.name, attempt.worker)
        if attempt.times is None or not attempt.times.preemptions:
            return None
        times = attempt.times
        text = (
            f"preempted {times.preemptions} times at {attempt.worker}, which computed "
            f"{times.recomputed_tokens} tokens again"
        )
        return Cause("preemption", late_us, text, stage.name, attempt.worker)

    def _prefill_beside(self, stage: StageTime, late_us: int, worker: str) -> int | None:
        """Return the tokens of long prompts that the worker computed for most of a stage's delay;
        None if there were none."""
        began_s = self._story.wall_s + stage.began_us / 1e6
        ended_s = began_s + stage.us / 1e6
        own_s, overlap_s, sum_tokens = self._story.wall_s, 0.0, 0
        for since_s, until_s, tokens in self._known.prefills.get(worker, ()):
            beside_s = min(ended_s, until_s) - max(began_s, since_s)
            is_own = any(
                abs(own_s + each.placed_us / 1e6 - since_s) < 1e-6 for each in self._attempts
            )
            if not is_own and beside_s > 0:
                overlap_s += beside_s
                sum_tokens += tokens
        return sum_tokens if sum_tokens and overlap_s * 1e6 >= late_us * PAUSE_SHARE else None

    def _attempt(self, stage: StageTime) -> AttemptFacts | None:
        return None if stage.attempt is None else self._attempts[stage.attempt]

    def _worker(self, stage: StageTime) -> str:
        attempt = self._attempt(stage)
        return "" if attempt is None else attempt.worker


def _count(tokens: int) -> str:
    return f"{tokens / 1e3:.0f}k" if tokens >= 10_000 else str(tokens)
