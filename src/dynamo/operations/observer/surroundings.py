"""Facts from around a request: usual times, pauses, moves and prompts of other requests."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

import msgspec

from dynamo.core.errors import InstanceGone, WorkerDraining, WorkerFailed
from dynamo.core.values import Load
from dynamo.operations.observer.stages import STAGES, UNKNOWN, find_stages, slowest_attempts
from dynamo.telemetry.story import AttemptFacts, EndedStory

TYPICAL_STORIES, FIRST_STORIES, SAMPLE_S = 256, 64, 15.0
MIN_TYPICAL = 8
COMPUTING_STAGES = ("prefill", UNKNOWN, "decode")
MIN_PAUSE_US = 500_000
"""A pause of an answer that is a pause even where nobody knows the usual pace."""
MAX_PREFILLS, MAX_PAUSES = 256, 1_000
MAX_WORKERS = 4_096
MIN_CORE_WAIT_S = 0.02
MIN_PACE_TOKENS = 4
"""A shorter answer does not tell the usual time of a token."""
LONG_PROMPT_TOKENS = 1_024
"""A prompt of so many tokens, and of half of all tokens that are ahead, is what others wait for."""
SILENT_TEXTS = ("does not answer", "did not answer", "stalled")


T = TypeVar("T")


def name_of_loss(attempt: AttemptFacts) -> str:
    """Return the name of the cause that ended an attempt."""
    reason = attempt.reason or attempt.error
    if attempt.error == WorkerDraining.code:
        return "drained worker"
    if any(text in reason for text in SILENT_TEXTS):
        return "frozen worker"
    if attempt.error in (WorkerFailed.code, InstanceGone.code):
        return "lost worker"
    return f"error {attempt.error}"


def notes_of(table: dict[str, deque[T]], process: str, most: int) -> deque[T]:
    """Return the last `most` notes on a process. Of too many processes, the first one is forgotten:
    a worker that starts again has another name."""
    notes = table.get(process)
    if notes is None:
        if len(table) >= MAX_WORKERS:
            del table[next(iter(table))]
        notes = table[process] = deque(maxlen=most)
    return notes


class Surroundings(msgspec.Struct):
    """Facts from around the time of a request. `pauses`: those of event loops by process, (end
    as Unix time, seconds). `planes`: (from, until, process, why). `marks`: the last workers and
    salts by the mark of a prompt's beginning: (salt mark, worker, Unix time). `prefills`: long ones
    by worker, (placed, from, until, tokens). `answered`: when each worker last ended an answer.
    `moves`: those of requests that lost their worker, by the worker to which they went: (from, in
    its steps from, first token, end, lost worker, name of the cause). `core_waits`: how long a
    worker had no core, (from, until, seconds). `timings`: the coefficients of each worker's step
    time, in ms."""

    pauses: dict[str, deque[tuple[float, float]]] = {}
    planes: deque[tuple[float, float, str, str]] = msgspec.field(
        default_factory=lambda: deque(maxlen=256)
    )
    marks: dict[tuple[str, int], deque[tuple[int, str, float]]] = {}
    prefills: dict[str, deque[tuple[float, float, float, int]]] = {}
    answered: dict[str, float] = {}
    moves: dict[str, deque[tuple[float, float, float, float, str, str]]] = {}
    core_waits: dict[str, deque[tuple[float, float, float]]] = {}
    core_totals: dict[str, tuple[float, float]] = {}
    timings: dict[str, tuple[float, ...]] = {}

    def add_moves(self, story: EndedStory) -> None:
        """Note where a request went on after it had lost its worker."""
        attempts = slowest_attempts(story)
        for lost, again in pairwise(attempts):
            if lost.error:
                placed_s = story.wall_s + again.placed_us / 1e6
                until_us = again.ended_us if again.first_us is None else again.first_us
                first_s = story.wall_s + until_us / 1e6
                ended_s = story.wall_s + again.ended_us / 1e6
                prefill_s = None if again.times is None else again.times.prefill_s
                taken_s = placed_s if prefill_s is None else first_s - prefill_s
                moves = notes_of(self.moves, again.worker, MAX_PREFILLS)
                moves.append((placed_s, taken_s, first_s, ended_s, lost.worker, name_of_loss(lost)))

    def add_prefills(self, story: EndedStory) -> None:
        """Note the long prompts that the workers of a request have computed."""
        for attempt in story.attempts:
            tokens = attempt.prompt_tokens - attempt.cached_tokens
            if tokens >= LONG_PROMPT_TOKENS:
                worker = attempt.prefill_worker or attempt.worker
                placed_s = began_s = story.wall_s + attempt.placed_us / 1e6
                until_us = attempt.ended_us if attempt.first_us is None else attempt.first_us
                until_s = story.wall_s + until_us / 1e6
                if attempt.times is not None and not attempt.prefill_worker:
                    began_s = until_s - (attempt.times.prefill_s or 0.0)
                prefills = notes_of(self.prefills, worker, MAX_PREFILLS)
                prefills.append((placed_s, began_s, until_s, tokens))

    def add_loads(self, loads: Mapping[str, Load], at_s: float) -> None:
        """Note the last pauses of the event loops of workers, their waits for a core since the last
        call, and their step times. `at_s`: the Unix time."""
        totals = self.core_totals
        self.core_totals = {worker: (at_s, load.core_wait_s) for worker, load in loads.items()}
        self.timings = {worker: load.timing for worker, load in loads.items() if load.timing}
        for worker, load in loads.items():
            since_s, before_s = totals.get(worker, (at_s, load.core_wait_s))
            if load.core_wait_s - before_s >= MIN_CORE_WAIT_S:
                waits = notes_of(self.core_waits, worker, MAX_PREFILLS)
                waits.append((since_s, at_s, load.core_wait_s - before_s))
            if load.last_pause is not None:
                pauses = notes_of(self.pauses, worker, MAX_PAUSES)
                if not pauses or pauses[-1] != load.last_pause:
                    pauses.append(load.last_pause)

    def add_answers(self, story: EndedStory) -> None:
        """Note which workers have answered."""
        for attempt in story.attempts:
            if not attempt.error:
                ended_s = story.wall_s + attempt.ended_us / 1e6
                self.answered[attempt.worker] = max(ended_s, self.answered.pop(attempt.worker, 0.0))
        while len(self.answered) > MAX_WORKERS:
            del self.answered[next(iter(self.answered))]

    def lived_on(self, worker: str, at_s: float) -> bool:
        """Return whether a worker has answered after a time."""
        return self.answered.get(worker, 0.0) > at_s

    def paused_us(self, process: str, began_s: float, ended_s: float) -> int:
        """Return for how long the event loop of a process stood still between two times."""
        pauses = self.pauses.get(process, ())
        overlaps = (min(ended_s, at_s) - max(began_s, at_s - seconds) for at_s, seconds in pauses)
        return sum(int(overlap * 1e6) for overlap in overlaps if overlap > 0)

    def plane_between(self, process: str, began_s: float, ended_s: float) -> str | None:
        """Return why a plane was away for a process in that time; None if none was."""
        for since_s, until_s, name, why in self.planes:
            if since_s < ended_s and until_s > began_s and name == process:
                return why
        return None


class TypicalTimes:
    """The usual time of each stage of a model: the lower quartile of its first requests and of one
    each `SAMPLE_S` in the last hour. A quarter of an hour of late ones does not change it. The time
    of decode is by token of the answer. "load" are the requests that a worker had before."""

    def __init__(self) -> None:
        self._sampled_s: dict[str, float] = {}
        self._times: defaultdict[tuple[str, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=TYPICAL_STORIES)
        )

    def add(self, story: EndedStory) -> None:
        """Learn from a request that ended well."""
        if story.end or len(story.attempts) > story.choices * story.prompts:
            return
        known = len(self._times.get((story.model, STAGES[0]), ()))
        if known >= FIRST_STORIES and story.wall_s < self._sampled_s[story.model] + SAMPLE_S:
            return
        self._sampled_s[story.model] = story.wall_s
        sums: defaultdict[str, int] = defaultdict(int)
        for stage in find_stages(story):
            sums[stage.name] += stage.us
        sums["load"] = story.attempts[0].load if story.attempts else 0
        for name in (*STAGES, "load"):
            if name == "decode" and _tokens(story) < MIN_PACE_TOKENS:
                continue
            self._times[story.model, name].append(sums[name] / _units(story, name))

    def knows(self, model: str) -> bool:
        """Return whether there were enough requests of a model to know what is usual."""
        return len(self._times.get((model, STAGES[0]), ())) >= MIN_TYPICAL

    def usual_us(self, story: EndedStory, stage: str) -> float:
        """Return the usual time of a stage for a request of this size. Before it is known, a stage
        that computes takes as long as it takes, without its longest pause, and others none."""
        times = self._times.get((story.model, stage))
        if times is None or len(times) < MIN_TYPICAL:
            if stage not in COMPUTING_STAGES:
                return 0.0
            return math.inf if stage != "decode" else _steady_us(story)
        return sorted(times)[len(times) // 4] * _units(story, stage)


def _steady_us(story: EndedStory) -> float:
    took_us = sum(stage.us for stage in find_stages(story) if stage.name == "decode")
    return took_us - story.gap_us if story.gap_us >= MIN_PAUSE_US else took_us


def _tokens(story: EndedStory) -> int:
    return story.output_tokens // max(1, story.choices * story.prompts)


def _units(story: EndedStory, stage: str) -> int:
    """Return the tokens after the first one, each of which takes a step; 1 for other stages."""
    return max(1, _tokens(story) - 1) if stage == "decode" else 1
