"""Best fit of one gang: the narrowest domain that takes all of its pods, with the least free room.

Of the fullest domains that take it, the one in which it breaks up the fewest unused hosts is
chosen. On 1,024 GPUs at a load of 0.95 this refuses 13 % of gangs instead of 18 %.

Within a domain the pods go to as few of its parts as possible: the roomiest first, and the last
one chosen to fit. A pod goes to the host with the least room that takes it, large pods first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.placement.topology import CLUSTER, HOST, Domain, Topology


class PodGroup(msgspec.Struct, frozen=True):
    """Equal pods of a gang. With a `level`, all are in one domain of it."""

    name: str
    count: int
    request: Mapping[str, int]
    level: str = CLUSTER
    selector: Mapping[str, str] = {}


class Gang(msgspec.Struct, frozen=True):
    """Pods that start together or not at all.

    `preferred` is the level at which a domain for all of them is looked for first; None is that
    above the hosts. No domain broader than `required` is taken. `after` names the gang that must
    stand before this one may start.
    """

    name: str
    groups: Sequence[PodGroup]
    preferred: str | None = None
    required: str = CLUSTER
    priority: int = 0
    after: str = ""

    def allowed_levels(self, topology: Topology) -> Iterator[str]:
        """Yield the levels from the preferred one to the required one."""
        levels = topology.levels
        last = levels.index(self.required)
        preferred = levels[-2] if self.preferred is None else self.preferred
        return reversed(levels[last : max(levels.index(preferred), last) + 1])


class PlacedPod(msgspec.Struct, frozen=True):
    """A pod of a group on a node."""

    group: str
    node: str


class PlacedGang(msgspec.Struct, frozen=True):
    """Where the pods of a gang are. `level` and `domain` name the narrowest domain with all."""

    gang: Gang
    pods: Sequence[PlacedPod]
    level: str
    domain: str


CANDIDATES = 3
"""Domains with room that are compared."""
Amounts = tuple[tuple[int, int], ...]
Move = tuple[Domain, Amounts, str]


class PodRow:
    """A group as the search needs it: amounts by number of resource, and hosts that it accepts."""

    __slots__ = ("amounts", "count", "group", "hosts", "level")

    def __init__(self, topology: Topology, group: PodGroup) -> None:
        numbers = topology.resources
        unknown = [name for name, amount in group.request.items() if amount and name not in numbers]
        self.group = group.name
        self.level = group.level
        self.count = 0 if unknown else group.count
        self.amounts: Amounts = tuple(
            (numbers[name], amount) for name, amount in group.request.items() if name in numbers
        )
        self.hosts = matching_hosts(topology, group.selector) if group.selector else None

    def fits(self, host: Domain) -> bool:
        """Whether a host has room for one pod."""
        free = host.free
        for number, amount in self.amounts:
            if free[number] < amount:
                return False
        return self.hosts is None or host.name in self.hosts


def matching_hosts(topology: Topology, selector: Mapping[str, str]) -> set[str]:
    """Return the names of the nodes with all these labels."""
    return {
        name
        for name, node in topology.nodes.items()
        if all(node.labels.get(key) == value for key, value in selector.items())
    }


def check_level(topology: Topology, gang: Gang) -> None:
    """Raise `ConfigError` for a level that the nodes do not have."""
    for level in (gang.required, gang.preferred, *(group.level for group in gang.groups)):
        if level is not None and level not in topology.levels:
            known = ", ".join(level for level in topology.levels if level)
            raise ConfigError(
                f"no node has the label {level} of {gang.name}", hint=f"one of {known}"
            )


def place(
    topology: Topology, gang: Gang, barred: frozenset[str] = frozenset()
) -> PlacedGang | None:
    """Place a gang and take its resources; None if no allowed domain takes all of it. Nodes in
    `barred` are left alone. Raises `ConfigError` for a level that no node has."""
    check_level(topology, gang)
    search = PlaceSearch(topology, gang, barred)
    if not search.possible:
        return None
    for level in gang.allowed_levels(topology):
        if (domain := search.best_domain(level)) is not None:
            search.fill(domain)
            return search.result()
    return None


def release(topology: Topology, placed: PlacedGang) -> None:
    """Give the resources of a gang back."""
    amounts = {group.name: PodRow(topology, group).amounts for group in placed.gang.groups}
    for pod in placed.pods:
        topology.take(topology.hosts[pod.node], amounts[pod.group], -1)


class PlaceSearch:
    """A search for the place of a gang. Moves are undone if a domain does not take all pods."""

    def __init__(self, topology: Topology, gang: Gang, barred: frozenset[str]) -> None:
        self.topology = topology
        self.gang = gang
        self.barred = barred
        self.rows = [PodRow(topology, group) for group in gang.groups]
        self.possible = all(
            row.count == group.count for row, group in zip(self.rows, gang.groups, strict=True)
        )
        sums: dict[int, int] = {}
        for row in self.rows:
            for number, amount in row.amounts:
                sums[number] = sums.get(number, 0) + amount * row.count
        self.needed = tuple(sums.items())
        capacity = topology.root.capacity
        self.scarce = max(
            sums, key=lambda number: sums[number] / (capacity[number] or 1), default=0
        )
        self.rows.sort(key=self._order)
        self.moves: list[Move] = []

    def _order(self, row: PodRow) -> tuple[bool, int]:
        """Rows that must be together come first, then large pods."""
        return not row.level, -dict(row.amounts).get(self.scarce, 0)

    def best_domain(self, level: str) -> Domain | None:
        """Return the domain of a level that is to take the gang, None without one."""
        best: tuple[int, Domain] | None = None
        tried = 0
        for domain in self.domains(level):
            if not self.fill(domain):
                continue
            broken = self._broken_hosts()
            self._undo(0)
            if best is None or broken < best[0]:
                best = (broken, domain)
            tried += 1
            if not best[0] or tried == CANDIDATES:
                break
        return best and best[1]

    def _broken_hosts(self) -> int:
        """Count the hosts that were unused, and are used in part by the moves."""
        scarce = self.scarce
        used: dict[str, int] = {}
        hosts = {}
        for host, amounts, _ in self.moves:
            hosts[host.name] = host
            amount = next((amount for number, amount in amounts if number == scarce), 0)
            used[host.name] = used.get(host.name, 0) + amount
        return sum(
            0 < host.free[scarce] == host.capacity[scarce] - used[name]
            for name, host in hosts.items()
        )

    def domains(self, level: str) -> list[Domain]:
        """Return the domains of a level with room for the sums, the least room first."""
        scarce = self.scarce
        able = [domain for domain in self.topology.domains[level] if self._has_room(domain)]
        able.sort(key=lambda domain: domain.free[scarce])
        return able

    def _has_room(self, domain: Domain) -> bool:
        free = domain.free
        return all(free[number] >= amount for number, amount in self.needed)

    def fill(self, domain: Domain) -> bool:
        """Put all pods into a domain, or none."""
        levels = self.topology.levels
        rest = []
        for row in self.rows:
            if not row.level or levels.index(row.level) <= levels.index(domain.level):
                rest.append((row, row.count))
            elif not self._fill_narrow(domain, row):
                return self._undo(0)
        return True if not self._descend(domain, rest) else self._undo(0)

    def _fill_narrow(self, domain: Domain, row: PodRow) -> bool:
        """Put a row into one domain of its own level within a broader one."""
        parts = [part for part in self.topology.domains[row.level] if domain in part.ancestors()]
        for part in sorted(parts, key=lambda part: part.free[self.scarce]):
            before = len(self.moves)
            if not self._descend(part, [(row, row.count)]):
                return True
            self._undo(before)
        return False

    def _descend(self, domain: Domain, rows: list[tuple[PodRow, int]]) -> list[tuple[PodRow, int]]:
        """Put pods into a domain. Returns those that are left over."""
        if domain.level == self.topology.levels[-2] or domain.level == HOST:
            return self._fill_hosts(domain.hosts, rows)
        scarce = self.scarce
        parts = sorted(domain.children, key=lambda part: part.free[scarce])
        while rows and parts:
            before = len(self.moves)
            for part in parts:  # the last one is chosen to fit: the least room that takes all
                if not self._lacks(part, rows) and not self._descend(part, rows):
                    return []
                self._undo(before)
            rows = self._descend(parts.pop(), rows)
        return rows

    def _lacks(self, domain: Domain, rows: list[tuple[PodRow, int]]) -> bool:
        needed = sum(dict(row.amounts).get(self.scarce, 0) * count for row, count in rows)
        return domain.free[self.scarce] < needed

    def _fill_hosts(
        self, hosts: Sequence[Domain], rows: list[tuple[PodRow, int]]
    ) -> list[tuple[PodRow, int]]:
        scarce, barred, take = self.scarce, self.barred, self.topology.take
        left: list[tuple[PodRow, int]] = []
        for row, wanted in rows:
            count = wanted
            while count:
                best: Domain | None = None
                for host in hosts:
                    if (
                        (best is None or host.free[scarce] < best.free[scarce])
                        and row.fits(host)
                        and host.name not in barred
                    ):
                        best = host
                if best is None:
                    left.append((row, count))
                    break
                take(best, row.amounts)
                self.moves.append((best, row.amounts, row.group))
                count -= 1
        return left

    def _undo(self, length: int) -> bool:
        while len(self.moves) > length:
            host, amounts, _ = self.moves.pop()
            self.topology.take(host, amounts, -1)
        return False

    def result(self) -> PlacedGang:
        """Return the place of the pods."""
        domain = self.topology.root
        if self.moves:
            hosts = {host.name: host for host, _, _ in self.moves}.values()
            around, *others = (list(host.ancestors()) for host in hosts)
            domain = next(each for each in around if all(each in other for other in others))
        pods = [PlacedPod(group, host.name) for host, _, group in self.moves]
        return PlacedGang(self.gang, pods, domain.level, domain.name)
