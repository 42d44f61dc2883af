"""Load balancing that knows nothing of models. A pick among 8 candidates takes one to two
microseconds."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from random import Random

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.settings.schema_router import MODE_ALIASES
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.interruptible import Interruptible

MODES_BY_ALIAS = dict(MODE_ALIASES)


class InstanceLoad:
    """The load of one instance. `calls` are this client's calls in flight. `live` is True while the
    instance is a candidate. `weight` comes from its capabilities."""

    __slots__ = ("calls", "current_weight", "instance", "live", "weight")

    def __init__(self, instance: Instance) -> None:
        self.calls: dict[Interruptible, None] = {}
        self.live = False
        self.current_weight = 0.0
        self.update_instance(instance)

    def update_instance(self, instance: Instance) -> None:
        """Take over a changed record of the instance."""
        self.instance = instance
        self.weight = weight_of(instance)


def weight_of(instance: Instance) -> float:
    """The positive number in `capabilities["weight"]`, otherwise 1."""
    weight = instance.capabilities.get("weight", 1.0)
    return float(weight) if isinstance(weight, int | float) and weight > 0 else 1.0


class LoadBalancer:
    """Holds the candidates and picks among them. `count_requests` returns the requests at one."""

    def __init__(self, rng: Random, count_requests: Callable[[str], int]) -> None:
        self._rng = rng
        self.count_requests = count_requests
        self._candidates: list[InstanceLoad] = []
        self._cursor = 0

    def set_candidates(self, loads: Sequence[InstanceLoad]) -> None:
        """Replace the candidates."""
        for load in self._candidates:
            load.live = False
        self._candidates = list(loads)
        for load in self._candidates:
            load.live = True

    def pick(self, mode: str, allowed: Container[str] | None = None) -> InstanceLoad:
        """Pick a candidate, among the ids in `allowed`. Raises `LookupError` without a candidate
        and `ConfigError` for an unknown mode."""
        choose = MODES.get(mode) or MODES[canonical_mode(mode)]
        loads = self._candidates
        if allowed is not None:
            loads = [load for load in loads if load.instance.id in allowed]
        if not loads:
            raise LookupError("no candidate")
        return choose(self, loads)

    def round_robin(self, loads: list[InstanceLoad]) -> InstanceLoad:
        """Pick the next candidate."""
        self._cursor += 1
        return loads[self._cursor % len(loads)]

    def random(self, loads: list[InstanceLoad]) -> InstanceLoad:
        """Pick any candidate with equal probability."""
        return loads[int(self._rng.random() * len(loads))]

    def least_loaded(self, loads: list[InstanceLoad]) -> InstanceLoad:
        """Pick the fewest requests; ties go to the next candidate."""
        count = self.count_requests
        counts = [count(load.instance.id) for load in loads]
        fewest = min(counts)
        self._cursor += 1
        start = self._cursor % len(loads)
        if counts[start] == fewest:
            return loads[start]
        try:
            return loads[counts.index(fewest, start)]
        except ValueError:
            return loads[counts.index(fewest)]

    def power_of_two(self, loads: list[InstanceLoad]) -> InstanceLoad:
        """Draw two candidates at random and pick the less loaded one."""
        size = len(loads)
        first = int(self._rng.random() * size)
        if size == 1:
            return loads[0]
        second = int(self._rng.random() * (size - 1))
        second += second >= first
        count = self.count_requests
        if count(loads[first].instance.id) <= count(loads[second].instance.id):
            return loads[first]
        return loads[second]

    def weighted(self, loads: list[InstanceLoad]) -> InstanceLoad:
        """Smooth weighted round robin as in nginx: shares follow the weights, picks are spread."""
        total = 0.0
        best = loads[0]
        for load in loads:
            load.current_weight += load.weight
            total += load.weight
            if load.current_weight > best.current_weight:
                best = load
        best.current_weight -= total
        return best


MODES: dict[str, Callable[[LoadBalancer, list[InstanceLoad]], InstanceLoad]] = {
    "round_robin": LoadBalancer.round_robin,
    "random": LoadBalancer.random,
    "least_loaded": LoadBalancer.least_loaded,
    "power_of_two": LoadBalancer.power_of_two,
    "weighted_round_robin": LoadBalancer.weighted,
}


def resolve_mode_alias(mode: str) -> str:
    """Return the name that a spelling of a router mode stands for; `-` and `_` are equal."""
    spelling = mode.strip().lower().replace("-", "_")
    return MODES_BY_ALIAS.get(spelling, spelling)


def canonical_mode(mode: str) -> str:
    """The key of `MODES` for a spelling. Raises `ConfigError`."""
    name = resolve_mode_alias(mode)
    if name not in MODES:
        hint = nearest_name_hint(name, MODES)
        raise ConfigError(f"there is no load-balancing mode {mode!r}", hint=hint)
    return name
