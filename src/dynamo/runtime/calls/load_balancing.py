"""The picks that know nothing of models, written once: each takes the candidates and answers one.

Costs for 8 candidates are one to two microseconds; all state is here, none in the callers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Sequence
from random import Random

from dynamo.core.errors import ConfigError
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.interruptible import Interruptible

MODE_ALIASES = {"basic": "round_robin", "weighted": "weighted_round_robin"}


class InstanceLoad:
    """One instance as the picks see it. `calls`: those of this client that it works on, `in_flight`
    their number; `live`: it is a candidate; `weight`: its capability of that name (1 where it has
    none)."""

    __slots__ = ("calls", "current_weight", "in_flight", "instance", "live", "weight")

    def __init__(self, instance: Instance) -> None:
        self.calls: set[Interruptible] = set()
        self.in_flight = 0
        self.live = False
        self.current_weight = 0.0
        self.update_instance(instance)

    def update_instance(self, instance: Instance) -> None:
        """Discovery says (again) what it is."""
        self.instance = instance
        self.weight = weight_of(instance)


def weight_of(instance: Instance) -> float:
    """The positive number under `capabilities.weight`, else 1."""
    weight = instance.capabilities.get("weight", 1.0)
    return float(weight) if isinstance(weight, int | float) and weight > 0 else 1.0


class LoadBalancer:
    """Candidates and how one is chosen of them."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._candidates: list[InstanceLoad] = []
        self._cursor = 0

    def set_candidates(self, slots: Sequence[InstanceLoad]) -> None:
        """These are the candidates from now on."""
        for slot in self._candidates:
            slot.live = False
        self._candidates = list(slots)
        for slot in self._candidates:
            slot.live = True

    def pick(self, mode: str, allowed: Container[str] | None = None) -> InstanceLoad:
        """One candidate (of those in `allowed`). Raises `LookupError` where there is none;
        `ConfigError` for a mode that does not exist."""
        choose = MODES.get(mode) or MODES[canonical_mode(mode)]
        slots = self._candidates
        if allowed is not None:
            slots = [slot for slot in slots if slot.instance.id in allowed]
        if not slots:
            raise LookupError("no candidate")
        return choose(self, slots)

    def round_robin(self, slots: list[InstanceLoad]) -> InstanceLoad:
        """The next in turn."""
        self._cursor += 1
        return slots[self._cursor % len(slots)]

    def random(self, slots: list[InstanceLoad]) -> InstanceLoad:
        """Any, with equal chances."""
        return slots[int(self._rng.random() * len(slots))]

    def least_loaded(self, slots: list[InstanceLoad]) -> InstanceLoad:
        """The fewest in flight; among equals the next in turn."""
        counts = [slot.in_flight for slot in slots]
        fewest = min(counts)
        self._cursor += 1
        start = self._cursor % len(slots)
        if counts[start] == fewest:
            return slots[start]
        try:
            return slots[counts.index(fewest, start)]
        except ValueError:
            return slots[counts.index(fewest)]

    def power_of_two(self, slots: list[InstanceLoad]) -> InstanceLoad:
        """The less loaded of two different ones, drawn at random."""
        size = len(slots)
        first = int(self._rng.random() * size)
        if size == 1:
            return slots[0]
        second = int(self._rng.random() * (size - 1))
        second += second >= first
        one, other = slots[first], slots[second]
        return one if one.in_flight <= other.in_flight else other

    def weighted(self, slots: list[InstanceLoad]) -> InstanceLoad:
        """Smooth weighted round robin (nginx): shares follow the weights, turns are spread."""
        total = 0.0
        best = slots[0]
        for slot in slots:
            slot.current_weight += slot.weight
            total += slot.weight
            if slot.current_weight > best.current_weight:
                best = slot
        best.current_weight -= total
        return best


MODES: dict[str, Callable[[LoadBalancer, list[InstanceLoad]], InstanceLoad]] = {
    "round_robin": LoadBalancer.round_robin,
    "random": LoadBalancer.random,
    "least_loaded": LoadBalancer.least_loaded,
    "power_of_two": LoadBalancer.power_of_two,
    "weighted_round_robin": LoadBalancer.weighted,
}


def canonical_mode(mode: str) -> str:
    """The key of `MODES` that is meant; `-` and `_` are alike. Raises `ConfigError`."""
    plain = mode.strip().lower().replace("-", "_")
    name = MODE_ALIASES.get(plain, plain)
    if name not in MODES:
        near = difflib.get_close_matches(plain, MODES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(MODES)}"
        raise ConfigError(f"no pick is called {mode!r}", hint=hint)
    return name
