"""The policies `static`, `rule`, `throughput` and `load`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynamo.operations.planner.capacity import PromiseCapacity
from dynamo.operations.planner.policies.policy import (
    ScalePolicy,
    WorkPolicy,
    at_least_one,
    held_size,
    is_split,
    kinds_of,
    ready,
    series,
    size_fact,
    spread,
    total,
)
from dynamo.operations.planner.values import Proposal, Role, Scene

TARGET = 0.7
"""The share of a worker's time that is to be busy by `rule`."""
TOLERANCE = 0.1
"""Sizes do not change while the share is so near to the target."""
HOLD_S = 300.0
"""`rule` shrinks to the largest size that was wanted in this time, as a HorizontalPodAutoscaler."""
MAX_THROUGHPUT_REPLICAS = 8
LOAD_SHARE = 0.8
"""`load` removes a worker if the others then keep this share of the promise."""


class StaticPolicy(ScalePolicy):
    """Keeps the sizes of `planner.sizes`, and of other kinds the present ones."""

    interval_s = 5.0

    def propose(self, scene: Scene) -> Proposal:
        sizes = {
            name: self.options.sizes.get(name, kind.wanted) for name, kind in scene.kinds.items()
        }
        return Proposal(sizes, "the sizes are fixed")


class RulePolicy(WorkPolicy):
    """Keeps the share of time in which workers are busy at a target."""

    def propose_by(self, scene: Scene, capacity: PromiseCapacity) -> Proposal:
        sizes, works, facts = dict[str, int](), dict[str, float](), dict[str, float]()
        for role, work in role_works(scene, capacity).items():
            kinds = kinds_of(scene, role)
            works[role] = work
            size = total(kinds)
            if size and abs(work / size / TARGET - 1) <= TOLERANCE:
                wanted = size
            else:
                wanted = at_least_one(scene, work / TARGET)
            facts |= {f"work {role}": work, **size_fact(role, wanted)}
            sizes |= spread(max(wanted, min(size, held_size(scene, role, HOLD_S))), kinds)
        busy = " and ".join(f"{work:.2f}" for work in works.values())
        return Proposal(
            sizes,
            f"{busy} workers of work arrived, of which each is to take {TARGET:g}",
            facts,
        )


class ThroughputPolicy(WorkPolicy):
    """Divides the predicted rate of requests by what one worker serves (NVIDIA Dynamo's)."""

    interval_s = 180.0

    def propose_by(self, scene: Scene, capacity: PromiseCapacity) -> Proposal:
        rate = scene.demand.requests / scene.demand.seconds
        predicted = self.options.predictor(series(scene, "rate", rate))
        prompt_s, answer = capacity.prompt_ms / 1e3, capacity.lengths.answer
        batch = max(1.0, capacity.batch(1.0, with_prompts=False))
        answer_s = answer * capacity.answer_work_ms(batch) / 1e3
        needs: dict[Role, float] = {"both": prompt_s + answer_s}
        if is_split(scene):
            needs = {"prefill": prompt_s, "decode": answer_s}
        sizes: dict[str, int] = {}
        for role, each_s in needs.items():
            kinds = kinds_of(scene, role)
            size = total(kinds)
            wanted = at_least_one(scene, predicted * each_s)
            sizes |= spread(min(wanted, size + MAX_THROUGHPUT_REPLICAS), kinds)
        return Proposal(
            sizes,
            f"{predicted:.2f} requests/s are predicted",
            {"rate": rate},
        )


class LoadPolicy(WorkPolicy):
    """Adds a worker while the estimated latencies are above the promise, and removes one that the
    others can do without (NVIDIA Dynamo's)."""

    interval_s = 5.0

    def propose_by(self, scene: Scene, capacity: PromiseCapacity) -> Proposal:
        sizes, shares = dict[str, int](), dict[str, float]()
        roles: Sequence[Role] = ("prefill", "decode") if is_split(scene) else ("both",)
        for role in roles:
            kinds = kinds_of(scene, role)
            size, serving = total(kinds), ready(kinds)
            share = shares[role] = _promise_share(scene, capacity, role, serving)
            if any(kind.starting or kind.draining for kind in kinds.values()):
                wanted = size
            elif share > 1:
                wanted = size + 1
            elif serving > 1 and share * serving / (serving - 1) < LOAD_SHARE:
                wanted = size - 1
            else:
                wanted = size
            sizes |= spread(at_least_one(scene, wanted), kinds)
        why = ", ".join(f"{share:.0%}" for share in shares.values())
        return Proposal(sizes, f"workers take {why} of the promised latencies")


def role_works(scene: Scene, capacity: PromiseCapacity) -> dict[Role, float]:
    """Return the workers of each role that are busy all the time with what arrived."""
    if not is_split(scene):
        return {"both": capacity.work(scene.demand)}
    demand, lengths = scene.demand, capacity.lengths
    prompts_ms = capacity.prompt_work_ms(demand.prompt_tokens)
    prompts_ms += capacity.timing.c0 * demand.requests
    batch = capacity.batch(with_prompts=False)
    answers_ms = demand.requests * lengths.answer * capacity.answer_work_ms(batch)
    return {
        "prefill": prompts_ms / 1e3 / demand.seconds,
        "decode": answers_ms / 1e3 / demand.seconds,
    }


def _promise_share(scene: Scene, capacity: PromiseCapacity, role: str, serving: int) -> float:
    """Return the largest part of a promised latency that the workers of a role take."""
    demand, promise, serving = scene.demand, scene.promise, max(1, serving)
    share = 0.0
    if role != "decode" and not math.isinf(promise.ttft_s):
        queued_ms = capacity.prompt_work_ms(demand.queued_tokens) / serving
        share = queued_ms / (promise.ttft_s * 1e3)
    if role != "prefill" and not math.isinf(promise.itl_ms):
        batch = capacity.batch(1.0, with_prompts=role == "both")
        share = max(share, demand.running / serving / max(1.0, batch))
    return share
