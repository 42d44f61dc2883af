"""The interface of policies, and what several of them use."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from dynamo.operations.planner.capacity import Lengths, PromiseCapacity
from dynamo.operations.planner.predictors import Predictor, adaptive
from dynamo.operations.planner.values import KindState, Proposal, Role, Scene

DEFAULT_START_S = 30.0
"""The time of a start before one was seen."""
DEFAULT_ANSWER = 256.0
"""Tokens of an answer before one has ended."""
LENGTHS_SMOOTHING = 0.3


class PolicyOptions(msgspec.Struct, frozen=True):
    """The options of all policies. `sizes`: fixed ones by kind. `eta`: the share of a worker's time
    that forecast work may take, by the backtest; 0: none was made, and `eta_missing` says why.
    `peak`: the fewest workers that serve all of the record."""

    predictor: Predictor = adaptive
    sizes: Mapping[str, int] = {}
    eta: float = 0.0
    eta_missing: str = ""
    peak: int = 0


class ScalePolicy(ABC):
    """Proposes sizes. A policy is a function of the scene: it keeps nothing between calls."""

    interval_s = 15.0
    """The time between two decisions."""

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    @abstractmethod
    def propose(self, scene: Scene) -> Proposal:
        """Return the wanted size of each kind that is to change, or to stay for a reason."""


class WorkPolicy(ScalePolicy):
    """Proposes sizes by what workers carry: it keeps the sizes while nobody knows that."""

    def propose(self, scene: Scene) -> Proposal:
        demand = scene.demand
        if demand.timing is None:
            sizes = spread(at_least_one(scene, total(scene.kinds)), scene.kinds)
            return Proposal(sizes, "no worker has reported yet how long its steps take")
        lengths = lengths_of(scene)
        capacity = PromiseCapacity(demand.timing, demand.limits, scene.promise, lengths)
        proposal = self.propose_by(scene, capacity)
        facts = {**proposal.facts, "prompt": lengths.prompt, "answer": lengths.answer}
        notes = [each for each in (capacity.fault, *proposal.notes) if each]
        return replace(proposal, facts=facts, notes=notes)

    @abstractmethod
    def propose_by(self, scene: Scene, capacity: PromiseCapacity) -> Proposal:
        """Return the proposal. Its facts get the lengths of requests, and its notes the reason why
        no size keeps the promise."""


def kinds_of(scene: Scene, role: Role) -> Mapping[str, KindState]:
    """Return the kinds of a role."""
    return {name: kind for name, kind in scene.kinds.items() if kind.role == role}


def is_split(scene: Scene) -> bool:
    """Return whether some workers only compute prompts."""
    return bool(kinds_of(scene, "prefill")) and bool(kinds_of(scene, "decode"))


def start_s(kinds: Mapping[str, KindState]) -> float:
    """Return how long a start takes."""
    return max((kind.start_s for kind in kinds.values()), default=0.0) or DEFAULT_START_S


def ready(kinds: Mapping[str, KindState]) -> int:
    """Return how many workers serve."""
    return sum(kind.ready for kind in kinds.values())


def total(kinds: Mapping[str, KindState]) -> int:
    """Return how many workers are ordered."""
    return sum(kind.wanted for kind in kinds.values())


def spread(count: int, kinds: Mapping[str, KindState]) -> dict[str, int]:
    """Divide workers of one role among its kinds: kinds keep their sizes, the first one that does
    not fail grows, the last ones shrink."""
    sizes = {name: kind.wanted for name, kind in kinds.items()}
    rest = count - sum(sizes.values())
    if rest > 0 and kinds:
        sound = [name for name, kind in kinds.items() if not kind.failing] or list(kinds)
        sizes[sound[0]] += rest
    for name in reversed(sizes):
        less = min(sizes[name], max(0, -rest))
        sizes[name] -= less
        rest += less
    return sizes


def lengths_of(scene: Scene) -> Lengths:
    """Return the smoothed lengths of prompts, without what was cached, and of answers."""
    demand = scene.demand
    known = scene.past[-1].facts if scene.past else {}
    prompt, answer = known.get("prompt", 0.0), known.get("answer", 0.0)
    if demand.requests:
        prompt = _smooth(prompt, demand.prompt_tokens / demand.requests)
    if demand.ended:
        answer = _smooth(answer, demand.output_tokens / demand.ended)
    return Lengths(prompt, answer or DEFAULT_ANSWER)


def series(scene: Scene, fact: str, now: float) -> Sequence[float]:
    """Return a fact of all samples that have it, and of now."""
    return [*(each.facts[fact] for each in scene.past if fact in each.facts), now]


def at_least_one(scene: Scene, count: float) -> int:
    """Return whole workers. Requests that wait without any worker want one."""
    waits = scene.demand.waiting or scene.demand.queued_tokens or scene.demand.running
    return max(math.ceil(count - 1e-9), 1 if waits else 0)


def held_size(scene: Scene, role: Role, seconds: float) -> int:
    """Return the largest size that a role wanted in the last seconds (see `size_fact`). Before the
    past is so long, the present size counts, too. Of split roles "both" are all workers."""
    since = scene.now_s - seconds - 1e-6
    past = [each.facts for each in scene.past if each.now_s >= since]
    held = max((int(facts.get(f"size {role}", 0)) for facts in past), default=0)
    if len(past) == len(scene.past):
        held = max(held, total(kinds_of(scene, role) or scene.kinds))
    return held


def size_fact(role: Role, size: int) -> dict[str, float]:
    """Return the fact that `held_size` reads: what a role wants now, without what is held."""
    return {f"size {role}": float(size)}


def _smooth(before: float, now: float) -> float:
    return before + LENGTHS_SMOOTHING * (now - before) if before else now
