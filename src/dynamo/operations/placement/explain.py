"""Why a gang has its place, or none: a line for each domain that was looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo.operations.placement.fit import Gang, PlacedGang, PlaceSearch, PodRow
from dynamo.operations.placement.quantity import format_quantity
from dynamo.operations.placement.topology import Domain, Topology, level_noun

MOST_DOMAINS = 8
"""Domains of a level with a line each."""


def describe_place(placed: PlacedGang) -> Sequence[str]:
    """Return where the pods of a gang are, a line for each node."""
    by_node: dict[str, dict[str, int]] = {}
    for pod in placed.pods:
        groups = by_node.setdefault(pod.node, {})
        groups[pod.group] = groups.get(pod.group, 0) + 1
    where = f"{level_noun(placed.level)} {placed.domain}".strip()
    return [
        f"{placed.gang.name}: {len(placed.pods)} pods in {where}",
        *(
            f"  {node}: {', '.join(f'{count} {group}' for group, count in groups.items())}"
            for node, groups in sorted(by_node.items())
        ),
    ]


def explain_refusal(topology: Topology, gang: Gang) -> Sequence[str]:
    """Return what each allowed domain lacks for a gang that was not placed."""
    search = PlaceSearch(topology, gang, frozenset())
    lines = [f"{gang.name}: waits, no domain takes all of its pods"]
    lines += [
        f"  no node has {name}, which {group.name} needs"
        for group in gang.groups
        for name in sorted(group.request.keys() - topology.resources.keys())
    ]
    if len(lines) > 1:
        return lines
    for level in gang.allowed_levels(topology):
        domains = sorted(topology.domains[level], key=lambda domain: -domain.free[search.scarce])
        lines += [f"  {domain_lack(topology, search, domain)}" for domain in domains[:MOST_DOMAINS]]
        if len(domains) > MOST_DOMAINS:
            lines.append(f"  {len(domains) - MOST_DOMAINS} more with less room")
    return lines


def domain_lack(topology: Topology, search: PlaceSearch, domain: Domain) -> str:
    """Return such as `rack r2 lacks 4 nvidia.com/gpu`."""
    names = list(topology.resources)
    lacks = [
        f"{format_quantity(amount - domain.free[number])} {names[number]}"
        for number, amount in search.needed
        if domain.free[number] < amount
    ]
    if lacks:
        return f"{domain.describe()} lacks {' and '.join(lacks)}"
    reasons = list(_rows_without_host(search, domain, names))
    if reasons:
        return f"{domain.describe()}: {'; '.join(reasons)}"
    free = format_quantity(domain.free[search.scarce])
    return (
        f"{domain.describe()} has {free} {names[search.scarce]} free, "
        "but not in parts that take all pods"
    )


def _rows_without_host(search: PlaceSearch, domain: Domain, names: Sequence[str]) -> Iterator[str]:
    for row in search.rows:
        if not any(row.fits(host) for host in domain.hosts):
            yield f"no host takes a pod of {row.group} ({_request_text(row, names)})"


def _request_text(row: PodRow, names: Sequence[str]) -> str:
    texts = [
        f"{format_quantity(amount)} {names[number]}"
        for number, amount in row.amounts
        if names[number] != "pods"
    ]
    return " and ".join(texts) or "any"
