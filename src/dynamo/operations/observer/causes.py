"""The causes that the observer knows: one function each, with the stages that they slow.

Each function is given a stage that was late, and returns the part of the time that was measured to
be due to its cause, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.operations.observer.cache_misses import explain_misses
from dynamo.operations.observer.stages import STAGES, UNKNOWN, StageTime, slowest_attempts
from dynamo.operations.observer.surroundings import LONG_PROMPT_TOKENS, Surroundings, name_of_loss
from dynamo.telemetry.story import AttemptFacts, EndedStory

MIN_STAGE_US = 20_000
"""Less than this is not told."""
MANY_TIMES = 4
"""Beside so many times the usual requests, an answer is slow because of them."""


class Cause(msgspec.Struct, frozen=True):
    """Why a request took longer, or failed. `name`: a word for groups. `us`: what it cost."""

    name: str
    us: int
    text: str
    stage: str = ""
    worker: str = ""


class LateRequest:
    """A request, its attempts, and the facts around it. `usual_load`: the requests that are usually
    at a worker. `lost`: the numbers of the attempts that failed."""

    def __init__(
        self, story: EndedStory, router: str, known: Surroundings, usual_load: float
    ) -> None:
        self.story, self.router, self.known, self.usual_load = story, router, known, usual_load
        self.attempts = attempts = slowest_attempts(story)
        self.placed_s = {story.wall_s + each.placed_us / 1e6 for each in attempts}
        self.missed = explain_misses(story, known.marks)
        self.lost = [number for number, each in enumerate(attempts[:-1]) if each.error]
        if attempts and attempts[-1].error not in ("", "cancelled"):
            self.lost.append(len(attempts) - 1)

    def loss_before(self, stage: StageTime) -> str:
        """Return the name of the loss but for which a stage would not have been; "" if there was
        none. The worker before had begun to answer, or its wait was predicted, which `explain_loss`
        tells."""
        number = stage.attempt or 0
        if number - 1 not in self.lost or stage.name in ("decode", "deliver"):
            return ""
        lost = self.attempts[number - 1]
        known = lost.first_us is not None or lost.predicted_us is not None
        return self.describe_loss(number - 1)[0] if known else ""

    def paused_us(self, stage: StageTime) -> int:
        """Return for how long the event loop of the serving process stood still in a stage."""
        began_s = self.story.wall_s + stage.began_us / 1e6
        return self.known.paused_us(self.router, began_s, began_s + stage.us / 1e6)

    def describe_loss(self, number: int) -> tuple[str, str]:
        """Return the name and the reason of a loss: a plane's, if its worker answers since then."""
        attempt, wall_s = self.attempts[number], self.story.wall_s
        silent_us = self.story.gap_us if attempt.first_us is not None else attempt.ended_us
        began_us = max(attempt.placed_us, attempt.ended_us - silent_us)
        ended_s = wall_s + attempt.ended_us / 1e6
        reason = attempt.reason or attempt.error
        away = self.known.plane_between(self.router, wall_s + began_us / 1e6, ended_s)
        if away is not None and self.known.lived_on(attempt.worker, ended_s):
            return "plane away", f"{reason}, while a plane was away: {away}"
        return name_of_loss(attempt), reason

    def is_lost(self, stage: StageTime) -> bool:
        """Return whether the time of a stage was lost with its worker: all until the first token,
        else all after it, and the next choice."""
        number = stage.attempt
        if number is None or not self.lost:
            return False
        if number in self.lost:
            until_us = self.attempts[number].first_us
            return until_us is None or stage.began_us >= until_us
        return stage.name == "place" and number > 0


class LateStage:
    """A stage of a request that was late by `late_us`, of which `rest_us` is not explained yet.
    `worker` is "" outside of attempts. Times with `_s` are since 1970."""

    def __init__(self, request: LateRequest, stage: StageTime, late_us: int) -> None:
        number = stage.attempt
        self.request, self.stage, self.name = request, stage, stage.name
        self.late_us = self.rest_us = late_us
        self.attempt = None if number is None else request.attempts[number]
        self.worker = "" if self.attempt is None else self.attempt.worker
        self.times = (self.attempt and self.attempt.times) or WorkerTimes()
        self.began_s = request.story.wall_s + stage.began_us / 1e6
        self.ended_s = self.began_s + stage.us / 1e6

    def overlap_us(self, since_s: float, until_s: float) -> int:
        """Return how much of the stage was between two times."""
        return max(0, int((min(self.ended_s, until_s) - max(self.began_s, since_s)) * 1e6))

    def ahead(self) -> int:
        """Return the requests that were ahead or beside, as its worker or the router counted."""
        if self.attempt is None or self.name == "place":
            return self.request.story.ahead
        counted: float | None = self.times.ahead_requests if self.name == "queue" else None
        if self.name == "decode":
            counted = self.times.decode_beside
        return self.attempt.load if counted is None else round(counted)

    def is_crowded(self) -> bool:
        """Return whether there were many times the usual requests beside."""
        return self.ahead() >= MANY_TIMES * (self.request.usual_load + 1)

    def explain(self, name: str, us: float, text: str, worker: str = "") -> Cause:
        """Return a cause that explains `us` of the time that is left."""
        return Cause(name, min(int(us), self.rest_us), text, self.name, worker or self.worker)


def stalled_loop(late: LateStage) -> Cause | None:
    """The event loop of the frontend or the worker stood still meanwhile."""
    best_us, best = 0, ""
    for process in dict.fromkeys((late.request.router, late.worker)):
        us = late.request.known.paused_us(process, late.began_s, late.ended_s)
        best_us, best = max((best_us, best), (us, process))
    if not best_us:
        return None
    text = f"the event loop of {best} stood still in stage {late.name}"
    return late.explain("stalled loop", best_us, text, best)


def plane_away(late: LateStage) -> Cause | None:
    """A plane's server was away while something was on its way between processes."""
    why = late.request.known.plane_between(late.request.router, late.began_s, late.ended_s)
    if why is None:
        return None
    text = f"in stage {late.name} while a plane was away: {why}"
    return late.explain("plane away", late.rest_us, text)


def lost_worker_beside(late: LateStage) -> Cause | None:
    """Requests of a lost worker came to the worker, or took the places that were left."""
    moves = late.request.known.moves
    workers = [late.worker] if late.worker else list(moves)
    decodes = late.name == "decode"  # where they are beside it until their end
    moved = [
        (lost, name, late.overlap_us(*((taken_s, ended_s) if decodes else (placed_s, first_s))))
        for worker in workers
        for placed_s, taken_s, first_s, ended_s, lost, name in moves.get(worker, ())
        if placed_s not in late.request.placed_s
    ]
    moved = [move for move in moved if move[2]]
    if not moved:
        return None
    lost, name, _ = moved[-1]
    beside = sum(us for _, _, us in moved) / late.stage.us if decodes else len(moved)
    share = min(1.0, beside / max(1, late.ahead()))
    at = f" at {late.worker}, to which" if late.worker else ", while"
    text = f"in stage {late.name}{at} {len(moved)} other requests of {lost} moved"
    return late.explain(name, late.late_us * share, text, lost)


def computed_again(late: LateStage) -> Cause | None:
    """The worker before was lost, with what it had computed."""
    request, number = late.request, late.stage.attempt
    if not number or number - 1 not in request.lost:
        return None
    lost = request.attempts[number - 1]
    text = f"computing at {late.worker} again what {lost.worker} had computed"
    return late.explain(request.describe_loss(number - 1)[0], late.rest_us, text, lost.worker)


def admission(late: LateStage) -> Cause | None:
    """There was no place, no worker or no model yet."""
    story = late.request.story
    ahead = f", behind {story.ahead} requests" if story.ahead else ""
    reasons = {
        "model": ("model load", "waited for the model to be loaded"),
        "start": ("worker start", "waited for a worker to start"),
        "limit": ("overload", f"waited for server.max_concurrent_requests{ahead}"),
        "slot": ("overload", f"waited for a free slot at a worker{ahead}"),
    }
    reason = reasons.get(story.waited_for)
    return None if reason is None else late.explain(reason[0], late.rest_us, reason[1])


def long_prompt_ahead(late: LateStage) -> Cause | None:
    """The worker computed long prompts of others first, or meanwhile."""
    us, tokens, worker = 0, 0, late.worker
    for placed_s, since_s, until_s, size in late.request.known.prefills.get(worker, ()):
        beside_us = late.overlap_us(since_s, until_s)
        if beside_us and placed_s not in late.request.placed_s:
            us, tokens = us + beside_us, tokens + size
    text = f"in stage {late.name} at {worker} while it computed {_count(tokens)} prompt tokens"
    longest = late.times.ahead_longest or 0
    if late.name == "place" and late.attempt is not None:
        us = min(us, late.attempt.waited_us)
        text = f"held by the router while {worker} computed {_count(tokens)} prompt tokens"
    elif late.name == "queue" and longest >= LONG_PROMPT_TOKENS:
        share_us = int(late.late_us * longest / max(longest, late.times.ahead_tokens or 0))
        if share_us >= us:
            us, (text, worker) = share_us, _queue(late)
    return late.explain("long prompt ahead", us, text, worker)


def busy_machine(late: LateStage) -> Cause | None:
    """The worker was ready to compute, but other threads had the cores of its machine. Where many
    answers are computed at once, these need the cores."""
    if late.name == "decode" and late.is_crowded():
        return None
    us = sum(
        late.overlap_us(since_s, until_s) * seconds / (until_s - since_s)
        for since_s, until_s, seconds in late.request.known.core_waits.get(late.worker, ())
    )
    text = f"in stage {late.name} while {late.worker} was ready, but had no core"
    return late.explain("busy machine", us, text) if us else None


def _slowed_by_batch_us(late: LateStage) -> float:
    """Return how much longer an answer took because of the others in its batch: as its worker has
    learnt, or all if there were many and they cost something. Where answers cost nothing, many
    prompts do, if no other cause is known; they are taken to be as long as this one."""
    attempt, beside = late.attempt, late.times.decode_beside
    timing = late.request.known.timings.get(late.worker, ())
    if attempt is None:
        return 0.0
    cost_us = 0.0
    if beside is not None and len(timing) >= len(("c0", "c1", "c2", "c3")):
        more = max(0.0, beside - late.request.usual_load) * attempt.output_tokens
        context = attempt.prompt_tokens + attempt.output_tokens / 2
        cost_us = more * (timing[2] + timing[3] * context) * 1e3
        if cost_us < MIN_STAGE_US:
            tokens = attempt.prompt_tokens - attempt.cached_tokens
            alone = late.is_crowded() and late.rest_us == late.late_us
            return beside * tokens * timing[1] * 1e3 if alone else 0.0
    return late.rest_us if late.is_crowded() else cost_us


def overload(late: LateStage) -> Cause | None:
    """Many requests waited, or were computed together."""
    attempt, ahead, us, worker = late.attempt, late.ahead(), float(late.rest_us), ""
    if late.name == "decode":
        us = _slowed_by_batch_us(late)
    if attempt is None or not us:
        return None
    tokens = attempt.prompt_tokens - attempt.cached_tokens
    work = "decoding" if late.name == "decode" else f"computing {tokens} prompt tokens"
    text = f"{work} at {late.worker} beside {ahead} request{'s' * (ahead != 1)}"
    if late.name == "place":
        us = attempt.waited_us
        text = f"held by the router for a better moment, with {attempt.queue_length} more"
    elif not ahead or (late.name == "prefill" and tokens >= LONG_PROMPT_TOKENS):
        return None
    elif late.name == "queue":
        text, worker = _queue(late)
    return late.explain("overload", us, text, worker)


def cache_miss(late: LateStage) -> Cause | None:
    """The prompt was not in the cache, for one of the reasons of `explain_misses`."""
    missed, attempt = late.request.missed, late.attempt
    if attempt is None or missed is None:
        return None
    tokens = attempt.prompt_tokens - attempt.cached_tokens
    if not missed.share and tokens < LONG_PROMPT_TOKENS:
        return None
    text = f"computing {_count(tokens)} prompt tokens at {late.worker}: {missed.reason}"
    return late.explain(missed.name, late.rest_us, text)


def late_blocks(late: LateStage) -> Cause | None:
    """KV blocks came late, from another worker or from a tier."""
    name, source = "slow tier", f"its tier {late.times.kv_from}"
    if late.times.kv_from in ("", "peer"):
        name = "slow transfer"
        source = (late.attempt and late.attempt.prefill_worker) or "another worker"
    return late.explain(name, late.rest_us, f"waited at {late.worker} for KV blocks of {source}")


def preemption(late: LateStage) -> Cause | None:
    """Blocks ran out, and tokens were computed again."""
    if not late.times.preemptions:
        return None
    text = f"preempted {late.times.preemptions} times at {late.worker}"
    if late.times.recomputed_tokens is not None:
        text += f", which computed {late.times.recomputed_tokens} tokens again"
    return late.explain("preemption", late.rest_us, text)


RULES: tuple[tuple[Callable[[LateStage], Cause | None], tuple[str, ...]], ...] = (
    (stalled_loop, STAGES),
    (plane_away, ("admit", "place", "send", UNKNOWN, "deliver")),
    (computed_again, ("prefill",)),
    (cache_miss, ("prefill",)),
    (late_blocks, ("transfer",)),
    (long_prompt_ahead, ("place", "queue", "prefill", "decode")),
    (lost_worker_beside, ("admit", "place", "queue", "prefill", "decode", UNKNOWN)),
    (admission, ("admit",)),
    (preemption, ("decode",)),
    (busy_machine, ("send", "queue", "prefill", "decode")),
    (overload, ("place", "queue", "prefill", "decode")),
)
"""The causes, and the stages that they slow. In this order, each explains what those before it have
left: first what interrupted the stage, then what it waited for."""

ADVICE = {
    "stalled loop": "the log of the process names the line that held it, or that it had no core",
    "plane away": "check the server of the plane; `dynamo doctor` reaches all of them",
    "model load": "keep the model loaded: a longer --keep-alive, or no --load on_demand",
    "worker start": "keep more workers ready",
    "lost worker": "its last log lines tell how it died (key l in `dynamo top`)",
    "frozen worker": "its log has its stacks, unless the process was stopped (state T)",
    "drained worker": "nothing: it was taken out of service",
    "slow transfer": "check the network between the workers: `dynamo doctor`",
    "slow tier": "check the disk or the store behind the tier; `dynamo kv` shows the tiers",
    "long prompt ahead": "use prefill workers, or a smaller engine.max_num_batched_tokens",
    "overload": "add workers: `dynamo scale worker=N`",
    "busy machine": "give its processes cores of their own, or fewer --threads",
    "eviction": "give more KV memory (--num-blocks), or a tier below it",
    "wrong salt": "send one key, cache_salt and adapter, or set engine.share_cache",
    "at another worker": "route by cached prefixes: --router-mode kv",
    "stale index": "check dynamo_kv_index_events_lost_total, and the server of the event plane",
    "new prompt": "nothing: the prompt is long, and nobody had sent it before",
    "preemption": "give more KV memory, or a smaller --max-num-seqs",
    "unexplained": "look at the log and the CPU of the process (`dynamo report` has both)",
    "slow client": "nothing here: the client or its network was slow",
}
"""A sentence on what to do for each name of a cause."""


def explain_stage(request: LateRequest, stage: StageTime, late_us: int) -> Iterator[Cause]:
    """Yield the causes of a stage that was late, and what is unexplained of it."""
    late = LateStage(request, stage, late_us)
    for find, stages in RULES:
        cause = find(late) if stage.name in stages else None
        if cause is not None and cause.us >= MIN_STAGE_US:
            late.rest_us -= cause.us
            yield cause
    if late.rest_us >= MIN_STAGE_US and late.rest_us * 2 >= late_us:
        at = f" at {late.worker}" if late.worker else ""
        text = f"in stage {stage.name}{at}, unexplained"
        if stage.name == UNKNOWN:
            text = f"until the first token{at}, whose engine does not tell its times"
        yield late.explain(f"unexplained: {stage.name}", late.rest_us, text)


def explain_loss(request: LateRequest, number: int, usual_us: float) -> Iterator[Cause]:
    """Yield what an attempt has cost that failed. If it had no token, the part that the router
    predicted beyond the usual is due to what was ahead."""
    story, attempt = request.story, request.attempts[number]
    following = request.attempts[number + 1 : number + 2]
    until_us = following[0].placed_us if following else story.ended_us
    # Tokens came until the worker failed: only the time after the last one is lost.
    began_us = attempt.placed_us
    if attempt.first_us is not None:
        began_us = max(began_us, until_us - max(story.gap_us, 0))
    elif attempt.predicted_us is not None:
        ahead_us = min(attempt.predicted_us - int(usual_us), until_us - began_us)
        if ahead_us >= MIN_STAGE_US:
            waited = StageTime("queue", began_us, ahead_us, number)
            yield from explain_stage(request, waited, ahead_us)
            began_us += ahead_us
    worker, (name, reason) = attempt.worker, request.describe_loss(number)
    moved = f", and it went on at {following[0].worker}" if following else ""
    at = f" at token {following[0].resumed}" if following and following[0].resumed else ""
    text = f"were lost with {worker}{at}: {reason}{moved}"
    yield Cause(name, until_us - began_us, text, "place", worker)


def _queue(late: LateStage) -> tuple[str, str]:
    """Describe a queue, and return its worker: the one that computes the prompt, if that took
    longer."""
    attempt, times, worker = late.attempt, late.times, late.worker
    if attempt is not None and (times.peer_queue_s or 0.0) * 1e6 > late.stage.us / 2:
        worker = attempt.prefill_worker
    with_tokens = f" with {_count(times.ahead_tokens)} prompt tokens" if times.ahead_tokens else ""
    text = f"waited at {worker} behind {late.ahead()} requests{with_tokens}"
    return text + ("" if attempt is None else _alternative(attempt)), worker


def _alternative(attempt: AttemptFacts) -> str:
    """Say what the router knew of another worker that would have been quicker."""
    others = [row for row in attempt.cost_table() if row.worker != attempt.worker]
    if not others or attempt.predicted_us is None:
        return ""
    best = others[0]
    held = f"held {best.overlap_blocks} blocks of the prompt"
    if not best.overlap_blocks:
        held = "held none of the prompt"
    return f"; {best.worker} was predicted to cost {best.cost / 1e3:.2g} s and {held}"


def _count(tokens: int) -> str:
    return f"{tokens / 1e3:.0f}k" if tokens >= 10_000 else str(tokens)
