"""Gates of pods: they open when a gang has a place. Gangs not bound in time are given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import wait_at_most
from dynamo.operations.operator.gangs import GANG, OPENED, GatedGraph, OpenGate, plan_gangs
from dynamo.operations.operator.names import GANG_GATE
from dynamo.operations.operator.status import time_text
from dynamo.operations.placement.nodes import read_nodes
from dynamo.operations.placement.topology import DEFAULT_LEVELS, Topology
from dynamo.services.operator.cluster import ClusterView, Owner

log = logging.getLogger(__name__)
RETRY_S = 2.0
"""While gangs wait, nodes and pods are listed so often."""


class GangGates:
    """Places the gangs of all graphs, one after the other. `waits` says why others wait."""

    def __init__(
        self,
        cluster: ClusterView,
        clock: Clock,
        list_graphs: Callable[[], Sequence[GatedGraph]],
        on_graph: Callable[[Owner], None],
    ) -> None:
        """`list_graphs` returns the graphs with pods that wait or are not bound. `on_graph` is
        called if a graph waits for another reason than before."""
        self._cluster = cluster
        self._clock = clock
        self._list_graphs = list_graphs
        self._on_graph = on_graph
        self._wake = asyncio.Event()
        self.waits: dict[Owner, str] = {}

    def wake(self) -> None:
        """Look at gated pods soon."""
        self._wake.set()

    async def run(self) -> None:
        """Place gangs until cancelled. Without gated pods nothing is listed."""
        while True:
            await wait_at_most(self._wake.wait(), RETRY_S if self._list_graphs() else None)
            self._wake.clear()
            if graphs := self._list_graphs():
                try:
                    await self._step(graphs)
                except DynamoError as error:
                    fields = {"error": error.message}
                    log.warning("gangs could not be placed", extra={"fields": fields})
                    await asyncio.sleep(RETRY_S)

    async def _step(self, graphs: Sequence[GatedGraph]) -> None:
        objects = [*await self._cluster.list("Node"), *await self._cluster.list("Pod")]
        topology = Topology(read_nodes(objects), DEFAULT_LEVELS)
        now = self._clock.wall()
        plan = plan_gangs(graphs, topology, now)
        for gate in plan.opened:
            await self._open(gate, now)
        for pod in plan.expired:
            await self._cluster.delete("Pod", dict(pod))
        before, self.waits = self.waits, dict(plan.waiting)
        for owner in before.keys() | self.waits.keys():
            if before.get(owner) != self.waits.get(owner):
                self._on_graph(owner)

    async def _open(self, gate: OpenGate, now: float) -> None:
        """Let a pod be scheduled on the nodes of its gang's domain."""
        pod: Mapping[str, Any] = gate.pod
        spec, metadata = pod["spec"], pod["metadata"]
        gates = [row for row in spec["schedulingGates"] if row["name"] != GANG_GATE]
        annotations = {
            **(metadata.get("annotations") or {}), OPENED: time_text(now), GANG: gate.gang,
        }  # fmt: skip
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "add", "path": "/metadata/annotations", "value": annotations},
            {"op": "add", "path": "/spec/nodeSelector",
             "value": {**(spec.get("nodeSelector") or {}), **gate.selector}},
            {"op": "replace", "path": "/spec/schedulingGates", "value": gates},
        ]  # fmt: skip
        await self._cluster.patch_pod(pod, patch)
