"""The gangs of a graph: what must start together, and what may follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dynamo.operations.placement.fit import Gang, PodGroup
from dynamo.operations.placement.topology import CLUSTER


class ScaledPart(msgspec.Struct, frozen=True):
    """A component of a graph: its replicas, of `nodes` pods each. A replica of several pods stays
    within a domain of `level`."""

    name: str
    replicas: int
    request: Mapping[str, int]
    min_available: int = 1
    nodes: int = 1
    level: str = CLUSTER
    selector: Mapping[str, str] = {}


def graph_gangs(
    graph: str,
    parts: Sequence[ScaledPart],
    preferred: str | None = None,
    required: str = CLUSTER,
    priority: int = 0,
) -> Sequence[Gang]:
    """Return the first gang, with the fewest replicas of each component that serve, and one for
    each further replica. These wait until the first one stands, so that prefill and decode are
    scaled apart, and a graph that cannot start holds no GPUs."""
    first, further = [], []
    for part in parts:
        base = min(part.replicas, max(1, part.min_available))
        if part.nodes > 1 and part.level:
            first += [_group(part, f"{part.name}-{number}", 1) for number in range(base)]
        elif base:
            first.append(_group(part, part.name, base))
        for number in range(base, part.replicas):
            group = _group(part, part.name, 1)
            name = f"{graph}-{part.name}-{number}"
            further.append(Gang(name, [group], preferred, required, priority, graph))
    return [Gang(graph, first, preferred, required, priority), *further] if first else []


def _group(part: ScaledPart, name: str, replicas: int) -> PodGroup:
    return PodGroup(name, replicas * part.nodes, part.request, part.level, part.selector)
