"""Updates by generations: the replicas of new and old workloads in the next step.

All roles of a generation serve each other and no other generation. The new generation grows by
steps in which all roles have the same share of their target. The old ones shrink by the same
share when the pods of a step are ready. A step needs only what is counted now, and the counts
before the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

MAX_SURGE = "nvidia.com/deployment-rolling-update-max-surge"
MAX_UNAVAILABLE = "nvidia.com/deployment-rolling-update-max-unavailable"
DEFAULT_BATCH = "25%"


class RoleCount(msgspec.Struct, frozen=True):
    """The replicas of a role: wanted, those of all generations before the update, and of the new
    generation those ordered and those ready."""

    target: int
    before: int
    new: int
    ready: int


class GenerationStep(msgspec.Struct, frozen=True):
    """The replicas by role that the new generation is to have, and all others together at most."""

    number: int
    count: int
    new: Mapping[str, int]
    old: Mapping[str, int]


def batch_size(target: int, annotations: Mapping[str, str]) -> int:
    """Return how many replicas of a role a step changes. Annotations have a number or percents."""
    text = annotations.get(MAX_SURGE) or annotations.get(MAX_UNAVAILABLE) or DEFAULT_BATCH
    number = text.removesuffix("%")
    if not number.isdecimal():
        number, text = DEFAULT_BATCH.removesuffix("%"), DEFAULT_BATCH
    size = -(-target * int(number) // 100) if text.endswith("%") else int(number)
    return max(1, size)


def next_step(roles: Mapping[str, RoleCount], annotations: Mapping[str, str]) -> GenerationStep:
    """Return the next step of an update."""
    count = max(
        (
            -(-max(role.before, role.target) // batch_size(role.target or role.before, annotations))
            for role in roles.values()
        ),
        default=1,
    )
    count = max(1, count)
    done = [
        count * min(role.new, role.ready, role.target) // role.target
        for role in roles.values()
        if role.target
    ]
    number = min(done, default=count)
    following = min(count, number + 1)
    new = {
        name: min(role.target, max(role.new, -(-following * role.target // count)))
        for name, role in roles.items()
    }
    old = {name: role.before - number * role.before // count for name, role in roles.items()}
    return GenerationStep(number, count, new, old)


def shrink(
    generations: Sequence[Mapping[str, int]], most: Mapping[str, int]
) -> Sequence[Mapping[str, int]]:
    """Return the replicas of old generations, the oldest first, so that all have at most so many.
    The oldest ones go first. A generation keeps one replica of each of its roles until it goes
    whole."""
    excess = {
        role: max(0, sum(counts.get(role, 0) for counts in generations) - most.get(role, 0))
        for counts in generations
        for role in counts
    }
    result = []
    for counts in generations:
        rest = {}
        for role, count in counts.items():
            taken = min(count, excess[role])
            excess[role] -= taken
            rest[role] = count - taken
        if any(rest.values()):
            rest = {role: count or min(1, counts[role]) for role, count in rest.items()}
        result.append(rest)
    return result
