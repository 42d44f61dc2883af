"""The picks that know nothing of models, written once: each takes the candidates and answers one.

Costs for 8 candidates are one to two microseconds; all state is here, none in the callers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Sequence
from random import Random

from dynamo.core.errors import ConfigError
from dynamo.runtime.instances import Instance
from dynamo.runtime.interruptible import Interruptible

ALIASES = {"basic": "round_robin", "weighted": "weighted_round_robin"}


class Slot:
    """One instance as the picks see it. `calls`: those of this client that it works on, `in_flight`
    their number; `live`: it is a candidate; `weight`: its capability of that name (1 where it has
    none)."""

    __slots__ = ("calls", "credit", "in_flight", "instance", "live", "weight")

    def __init__(self, instance: Instance) -> None:
        self.calls: set[Interruptible] = set()
        self.in_flight = 0
        self.live = False
        self.credit = 0.0
        self.announce(instance)

    def announce(self, instance: Instance) -> None:
        """Discovery says (again) what it is."""
        self.instance = instance
        self.weight = weight_of(instance)


def weight_of(instance: Instance) -> float:
    """The positive number under `capabilities.weight`, else 1."""
    weight = instance.capabilities.get("weight", 1.0)
    return float(weight) if isinstance(weight, int | float) and weight > 0 else 1.0


class Picks:
    """Candidates and how one is chosen of them."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._slots: list[Slot] = []
        self._cursor = 0

    def replace(self, slots: Sequence[Slot]) -> None:
        """These are the candidates from now on."""
        for slot in self._slots:
            slot.live = False
        self._slots = list(slots)
        for slot in self._slots:
            slot.live = True

    def pick(self, mode: str, allowed: Container[str] | None = None) -> Slot:
        """One candidate (of those in `allowed`). Raises `LookupError` where there is none;
        `ConfigError` for a mode that does not exist."""
        choose = MODES.get(mode) or MODES[mode_name(mode)]
        slots = self._slots
        if allowed is not None:
            slots = [slot for slot in slots if slot.instance.id in allowed]
        if not slots:
            raise LookupError("no candidate")
        return choose(self, slots)

    def round_robin(self, slots: list[Slot]) -> Slot:
        """The next in turn."""
        self._cursor += 1
        return slots[self._cursor % len(slots)]

    def random(self, slots: list[Slot]) -> Slot:
        """Any, with equal chances."""
        return slots[int(self._rng.random() * len(slots))]

    def least_loaded(self, slots: list[Slot]) -> Slot:
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

    def power_of_two(self, slots: list[Slot]) -> Slot:
        """The less loaded of two different ones, drawn at random."""
        size = len(slots)
        first = int(self._rng.random() * size)
        if size == 1:
            return slots[0]
        second = int(self._rng.random() * (size - 1))
        second += second >= first
        one, other = slots[first], slots[second]
        return one if one.in_flight <= other.in_flight else other

    def weighted(self, slots: list[Slot]) -> Slot:
        """Smooth weighted round robin (nginx): shares follow the weights, turns are spread."""
        total = 0.0
        best = slots[0]
        for slot in slots:
            slot.credit += slot.weight
            total += slot.weight
            if slot.credit > best.credit:
                best = slot
        best.credit -= total
        return best


MODES: dict[str, Callable[[Picks, list[Slot]], Slot]] = {
    "round_robin": Picks.round_robin,
    "random": Picks.random,
    "least_loaded": Picks.least_loaded,
    "power_of_two": Picks.power_of_two,
    "weighted_round_robin": Picks.weighted,
}


def mode_name(mode: str) -> str:
    """The key of `MODES` that is meant; `-` and `_` are alike. Raises `ConfigError`."""
    plain = mode.strip().lower().replace("-", "_")
    name = ALIASES.get(plain, plain)
    if name not in MODES:
        near = difflib.get_close_matches(plain, MODES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(MODES)}"
        raise ConfigError(f"no pick is called {mode!r}", hint=hint)
    return name
