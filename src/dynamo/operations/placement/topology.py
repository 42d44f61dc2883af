"""Nodes with free resources, and the domains that they form at each level of the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

HOST = "kubernetes.io/hostname"
DEFAULT_LEVELS = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/block",
    "topology.kubernetes.io/rack",
    HOST,
)
CLUSTER = ""
"""The level above all: one domain with every node."""


class Node(msgspec.Struct, frozen=True):
    """A node: its labels, and its resources in thousandths, in all and free."""

    name: str
    labels: Mapping[str, str]
    capacity: Mapping[str, int]
    free: Mapping[str, int]


class Domain:
    """Nodes that share the labels of a level and of those above it. `free` and `capacity` are sums
    by number of resource."""

    __slots__ = ("capacity", "children", "free", "hosts", "level", "name", "parent")

    def __init__(self, level: str, name: str, parent: Domain | None, resources: int) -> None:
        self.level = level
        self.name = name
        self.parent = parent
        self.children: list[Domain] = []
        self.hosts: list[Domain] = []
        self.free = [0] * resources
        self.capacity = [0] * resources

    def ancestors(self) -> Iterable[Domain]:
        """Yield the domain and those around it."""
        domain: Domain | None = self
        while domain is not None:
            yield domain
            domain = domain.parent

    def describe(self) -> str:
        """Return such as `rack r2`."""
        return f"{level_noun(self.level)} {self.name}".strip()


def level_noun(level: str) -> str:
    """Return the last part of a level's label, `cluster` for the level above all."""
    return {CLUSTER: "cluster", HOST: "host"}.get(level, level.rpartition("/")[2])


class Topology:
    """The domains of nodes. `levels` are label keys, broad to narrow; the last one is the host's.

    A node without the label of a level forms a domain of its own there.
    """

    def __init__(self, nodes: Sequence[Node], levels: Sequence[str] = DEFAULT_LEVELS) -> None:
        present = {key for node in nodes for key in node.labels}
        broad = [level for level in levels if level in present and level != HOST]
        self.levels = (CLUSTER, *broad, HOST)
        names = dict.fromkeys(name for node in nodes for name in (*node.capacity, *node.free))
        self.resources = {name: number for number, name in enumerate(names)}
        self.root = Domain(CLUSTER, "", None, len(names))
        self.nodes: dict[str, Node] = {}
        self.hosts: dict[str, Domain] = {}
        self.domains: dict[str, list[Domain]] = {level: [] for level in self.levels}
        self.domains[CLUSTER].append(self.root)
        by_path: dict[tuple[str, ...], Domain] = {}
        for node in nodes:
            self._add(node, by_path)

    def _add(self, node: Node, by_path: dict[tuple[str, ...], Domain]) -> None:
        parent, path = self.root, tuple[str, ...]()
        for level in self.levels[1:]:
            name = node.name if level == HOST else node.labels.get(level, f"of {node.name}")
            path = (*path, name)
            domain = by_path.get(path)
            if domain is None:
                domain = Domain(level, name, parent, len(self.resources))
                by_path[path] = domain
                parent.children.append(domain)
                self.domains[level].append(domain)
            parent = domain
        self.nodes[node.name] = node
        self.hosts[node.name] = parent
        for domain in parent.ancestors():
            domain.hosts.append(parent)
            for resource, number in self.resources.items():
                domain.free[number] += node.free.get(resource, 0)
                domain.capacity[number] += node.capacity.get(resource, 0)

    def take(self, host: Domain, amounts: Iterable[tuple[int, int]], sign: int = 1) -> None:
        """Take amounts by number of resource from a host; -1 gives them back."""
        for domain in host.ancestors():
            for number, amount in amounts:
                domain.free[number] -= sign * amount
