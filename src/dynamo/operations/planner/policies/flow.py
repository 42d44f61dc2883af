"""The policy `flow`: forecast work, with headroom that is learnt from what followed forecasts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from dynamo.operations.planner.capacity import PromiseCapacity
from dynamo.operations.planner.policies.policy import (
    WorkPolicy,
    at_least_one,
    held_size,
    is_split,
    kinds_of,
    ready,
    series,
    size_fact,
    spread,
    start_s,
    total,
)
from dynamo.operations.planner.policies.simple import RulePolicy, role_works
from dynamo.operations.planner.predictors import Predictor
from dynamo.operations.planner.values import KindState, Proposal, Scene

PREFILL_SHARE, DECODE_SHARE = 0.8, 0.85
"""The parts of a worker's time that forecast prompts and answers take."""
RUNNING_SHARE = 0.9
"""Sequences that decode now may take this part of the promised time between tokens."""
MEAN_S = 60.0
LEND_S = 120.0
HOLD_STARTS, MAX_HOLD_S = 30, 1800.0
"""Workers that can turn are held for so many times of a start: a mix of requests that comes back
needs them sooner than they start."""
STEADY = 0.5
"""A role shrinks by one worker only if so much of another one is spare, too."""


def propose_roles(scene: Scene, capacity: PromiseCapacity, predictor: Predictor) -> Proposal:
    """Want workers for prompts and for answers by their forecast work. Where the budget does not
    hold both, the bare work of both comes first, and headroom is what is left."""
    prompts, answers = kinds_of(scene, "prefill"), kinds_of(scene, "decode")
    works = role_works(scene, capacity)
    lead_s = max(MIN_CLEAR_S, start_s({**prompts, **answers}))
    queued = capacity.prompt_work_ms(scene.demand.queued_tokens) / 1e3 / lead_s
    running = scene.demand.running / max(1.0, capacity.batch(RUNNING_SHARE, with_prompts=False))
    bare = (
        predictor(series(scene, "work prefill", works["prefill"])) + queued,
        max(predictor(series(scene, "work decode", works["decode"])), running),
    )
    wanted = (
        (bare[0] - queued) / PREFILL_SHARE + queued,
        max(bare[1] / DECODE_SHARE if bare[1] > running else 0.0, running),
    )
    means = tuple(_mean(scene, fact) for fact in ("wanted prefill", "wanted decode"))
    sizes = [max(each, mean) for each, mean in zip(wanted, means, strict=True)]
    both = (prompts, answers)
    counts = _whole_sizes(scene, bare, queued, sizes, both)
    needed = sum(counts)
    held = _hold(scene, counts, both)
    lent = _lend(scene, counts, bare, both)
    facts = {
        **size_fact("both", needed),
        "work prefill": works["prefill"],
        "work decode": works["decode"],
        "wanted prefill": wanted[0],
        "wanted decode": wanted[1],
        **lent,
    }
    why = (
        f"prompts are {bare[0]:.2f} workers of work and answers {bare[1]:.2f}, of which workers "
        f"take {PREFILL_SHARE:g} and {DECODE_SHARE:g}"
    )
    if held:
        why += f"; {held} that could turn are held"
    for fact, count in lent.items():
        why += f"; {count:.0f} {fact.removeprefix('lent ')} workers turn, which the others lack now"
    return Proposal(spread(counts[0], prompts) | spread(counts[1], answers), why, facts)


def _whole_sizes(
    scene: Scene,
    bare: Sequence[float],
    queued: float,
    sizes: Sequence[float],
    roles: Sequence[Mapping[str, KindState]],
) -> list[int]:
    """Return whole workers of both roles, within the budget."""
    room = _room(scene)
    if room is not None and sum(map(math.ceil, sizes)) > room:
        present = [total(kinds) for kinds in roles]
        sizes = _share(bare, queued, sizes, room, present)
        counts = [at_least_one(scene, size) for size in sizes]
    else:
        counts = [
            _steady(at_least_one(scene, size), size, kinds)
            for size, kinds in zip(sizes, roles, strict=True)
        ]
    if room is not None and sum(counts) > room:  # rounding
        counts[counts.index(max(counts))] -= sum(counts) - room
    return counts


def _can_turn(roles: Sequence[Mapping[str, KindState]]) -> bool:
    return all(kind.pool for kinds in roles for kind in kinds.values())


def _hold(scene: Scene, counts: list[int], roles: Sequence[Mapping[str, KindState]]) -> int:
    """Let workers that can turn stay while both roles together wanted so many not long ago. Returns
    how many stay."""
    before = sum(counts)
    hold_s = min(MAX_HOLD_S, HOLD_STARTS * start_s(scene.kinds))
    lacks = held_size(scene, "both", hold_s) - before
    for index, kinds in enumerate(roles) if _can_turn(roles) else ():
        more = max(0, min(lacks, total(kinds) - counts[index]))
        counts[index] += more
        lacks -= more
    return sum(counts) - before


def _lend(
    scene: Scene,
    counts: list[int],
    bare: Sequence[float],
    roles: Sequence[Mapping[str, KindState]],
) -> dict[str, float]:
    """Change the counts where one role has workers to spare and the other one lacks some now.

    A worker turns at once, and a start takes a while. The role that has lent does not grow again
    for `LEND_S`. Returns the facts.
    """
    if not _can_turn(roles):
        return {}
    facts = {}
    for own, other in ((0, 1), (1, 0)):
        present = total(roles[own])
        spare = ready(roles[own]) - math.ceil(bare[own])
        lent = min(spare, math.ceil(bare[other]) - ready(roles[other]))
        fact = ("lent prefill", "lent decode")[own]
        if lent > 0:
            counts[own] = min(counts[own], present - lent)
            wanted = total(roles[other])
            counts[other] = max(counts[other], wanted + lent)
            facts[fact] = float(lent)
        elif any(fact in each.facts for each in scene.past if each.now_s > scene.now_s - LEND_S):
            counts[own] = min(counts[own], max(present, math.ceil(bare[own])))
    return facts


def _steady(count: int, size: float, kinds: Mapping[str, KindState]) -> int:
    """Return the present size instead of one less while `size` is near to that: sizes that follow
    chance use up the turns that the rails allow."""
    present = total(kinds)
    return present if count == present - 1 and size > count - STEADY else count


def _mean(scene: Scene, fact: str) -> float:
    since = scene.now_s - MEAN_S
    values = [each.facts[fact] for each in scene.past if each.now_s > since and fact in each.facts]
    return sum(values) / len(values) if values else 0.0


def _room(scene: Scene) -> int | None:
    """Return how many workers the budget holds."""
    gpus = max((kind.gpus or 1 for kind in scene.kinds.values()), default=1)
    return None if scene.budget is None else scene.budget // gpus


def _share(
    bare: Sequence[float], queued: float, sizes: Sequence[float], room: int, present: Sequence[int]
) -> Sequence[float]:
    """Divide the room: bare work of both first, the rest by what each wants beyond it. Prompts that
    are `queued` get what arriving work leaves. Sizes that have room for the bare work stay while
    they differ by a worker, else chance turns roles."""
    work = sum(bare)
    if work >= room:
        answers = math.ceil(bare[1])
        if math.ceil(bare[0] - queued) + answers <= room:
            return [float(room - answers), float(answers)]
        return [max(1.0, float(round(room * each / work))) for each in bare]
    beyond = [max(0.0, size - each) for size, each in zip(sizes, bare, strict=True)]
    left, share = room - work, sum(beyond) or 1.0
    first = round(bare[0] + left * beyond[0] / share)
    first = min(max(first, math.ceil(bare[0])), max(1, room - math.ceil(bare[1])))
    holds = all(work <= size for work, size in zip(bare, present, strict=True))
    if holds and sum(present) == room and abs(first - present[0]) <= 1:
        first = present[0]
    return [float(first), float(room - first)]


RATIOS = 400
"""Past forecasts that are compared with what followed."""
MIN_HOLD_S = 60.0
MIN_CLEAR_S = 30.0
"""A queue is to be worked off in this time, or in that of a start."""
QUEUED_SHARE = 0.1
"""Queues count once they take this part of the promised time to the first token."""
PEAK_SHARE = 1.3
"""Headroom above the largest size that the record needed is given only to forecasts and queues."""


class FlowPolicy(WorkPolicy):
    """Wants the forecast work, times what usually followed a forecast, over the share `eta` of a
    worker that the backtest found. Without a backtest it is `rule`."""

    def propose_by(self, scene: Scene, capacity: PromiseCapacity) -> Proposal:
        if is_split(scene):
            return propose_roles(scene, capacity, self.options.predictor)
        if not self.options.eta:
            ruled = RulePolicy(self.options).propose_by(scene, capacity)
            note = f"policy flow acts as rule: {self.options.eta_missing or 'no backtest yet'}"
            return replace(ruled, notes=[note])
        kinds, eta = kinds_of(scene, "both"), self.options.eta
        lead_s = start_s(kinds)
        work = capacity.work(scene.demand)
        forecast = self.options.predictor(series(scene, "work", work))
        factor = growth_factor(scene, lead_s + self.interval_s, work)
        queued = queued_workers(scene, capacity, kinds, lead_s)
        needed = forecast / eta + queued
        wanted = at_least_one(scene, forecast * factor / eta + queued)
        if self.options.peak:
            most = max(math.ceil(PEAK_SHARE * self.options.peak), at_least_one(scene, needed))
            wanted = min(wanted, most)
        held = held_size(scene, "both", max(MIN_HOLD_S, lead_s))
        why = (
            f"{work:.2f} workers of work arrived, {forecast:.2f} are forecast and "
            f"{factor:.2f} times that usually follows within a start of {lead_s:.0f} s, and each "
            f"takes {eta:g}"
        )
        if queued:
            why += f"; prompts that wait want {queued:.1f} more"
        if held > wanted:
            why += f"; {held} were wanted within the last {max(MIN_HOLD_S, lead_s):.0f} s"
        facts = {
            "work": work,
            "forecast": forecast,
            "factor": factor,
            "eta": eta,
            "peak": float(self.options.peak),
            **size_fact("both", wanted),
        }
        return Proposal(spread(max(wanted, held), kinds), why, facts)


def growth_factor(scene: Scene, horizon_s: float, work: float) -> float:
    """Return the median of what work grew to within a horizon, over the forecast before it."""
    past = [each for each in scene.past if "forecast" in each.facts][-RATIOS:]
    times = [*(each.now_s for each in past), scene.now_s]
    works = [*(each.facts["work"] for each in past), work]
    ratios = []
    end = 0
    for index, sample in enumerate(past):
        until = sample.now_s + horizon_s + 1e-6
        if until < times[end]:
            continue
        while end + 1 < len(times) and times[end + 1] <= until:
            end += 1
        if until > scene.now_s + 2e-6:
            break
        if sample.facts["forecast"] > 0 and end > index:
            ratios.append(max(works[index + 1 : end + 1]) / sample.facts["forecast"])
    return median(ratios) if ratios else 1.0


def queued_workers(
    scene: Scene, capacity: PromiseCapacity, kinds: Mapping[str, KindState], lead_s: float
) -> float:
    """Return the workers that waiting prompts want beyond those for arrivals."""
    queued_s = capacity.prompt_work_ms(scene.demand.queued_tokens) / 1e3
    if queued_s / max(1, ready(kinds)) <= QUEUED_SHARE * scene.promise.ttft_s:
        return 0.0
    return queued_s / max(MIN_CLEAR_S, lead_s)
