"""The queue of gangs: those that wait for room, and those that have a place."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.operations.placement.fit import Gang, PlacedGang, check_level, place, release
from dynamo.operations.placement.topology import Domain, Topology

BIND_S = 60.0
"""A gang that is not bound after so long gives everything back, and waits again."""
RESERVE_S = 60.0
"""After so long a wait a gang reserves a domain: others may take no room there."""


class WaitingGang(msgspec.Struct):
    """A gang that waits since `since`, with the domain that it has reserved."""

    gang: Gang
    since: float
    reserved: Domain | None = None


class GangQueue:
    """Places gangs first come, first served within a priority. Later ones that fit may start ahead
    of one that does not, but not in a domain that it has reserved."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.waiting: list[WaitingGang] = []
        self.running: dict[str, PlacedGang] = {}

    def add(self, gang: Gang, now: float) -> None:
        """Let a gang wait. Raises `ConfigError` for a level that no node has."""
        check_level(self.topology, gang)
        self.waiting.append(WaitingGang(gang, now))
        self.waiting.sort(key=lambda entry: (-entry.gang.priority, entry.since))

    def remove(self, name: str) -> None:
        """Forget a gang, and give its resources back."""
        if placed := self.running.pop(name, None):
            release(self.topology, placed)
        self.waiting = [entry for entry in self.waiting if entry.gang.name != name]

    def step(self, now: float) -> Sequence[PlacedGang]:
        """Place what fits. Returns the gangs that have their place now, whole."""
        changed = []
        barred: frozenset[str] = frozenset()
        for entry in list(self.waiting):
            if entry.gang.after and entry.gang.after not in self.running:
                continue
            if (placed := place(self.topology, entry.gang, barred)) is not None:
                self.waiting.remove(entry)
                self.running[entry.gang.name] = placed
                changed.append(placed)
            elif now - entry.since >= RESERVE_S:
                barred |= self._reserve(entry, barred)
        return changed

    def _reserve(self, entry: WaitingGang, barred: frozenset[str]) -> frozenset[str]:
        """Return the hosts of the domain that a waiting gang reserves, none if none can take it."""
        domain = entry.reserved
        if domain is None or not could_take(self.topology, entry.gang, domain):
            domain = entry.reserved = best_reservation(self.topology, entry.gang, barred)
        return frozenset(host.name for host in domain.hosts) if domain else frozenset()


def could_take(topology: Topology, gang: Gang, domain: Domain) -> bool:
    """Whether a domain could take a gang if it were empty: by its sums and by its largest host."""
    numbers = topology.resources
    for resource in {name for group in gang.groups for name in group.request}:
        if resource not in numbers:
            return False
        number = numbers[resource]
        wanted = sum(group.count * group.request.get(resource, 0) for group in gang.groups)
        largest = max(group.request.get(resource, 0) for group in gang.groups)
        if domain.capacity[number] < wanted:
            return False
        if max((host.capacity[number] for host in domain.hosts), default=0) < largest:
            return False
    return True


def best_reservation(
    topology: Topology, gang: Gang, barred: frozenset[str] = frozenset()
) -> Domain | None:
    """Return the narrowest allowed domain that could take a gang, with the most free room."""
    for level in gang.allowed_levels(topology):
        able = [
            domain
            for domain in topology.domains[level]
            if not any(host.name in barred for host in domain.hosts)
            and could_take(topology, gang, domain)
        ]
        if able:
            return max(able, key=lambda domain: sum(domain.free))
    return None
