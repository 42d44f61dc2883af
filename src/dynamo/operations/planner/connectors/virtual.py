"""The connector `virtual`: decisions in discovery, which another program carries out.

The planner puts an `Order` under `/_planner_targets/NAMESPACE/KIND`. A program that runs workers
reads it, changes its workers, and puts a `VirtualReport` under `/_planner_reports/NAMESPACE/KIND`,
whose `number` acknowledges the order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynamo.core.errors import DECODE_ERRORS, NotFound, PlaneUnavailable
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.values import KindState, Order
from dynamo.runtime.distributed import DistributedRuntime

TARGETS_PREFIX, REPORTS_PREFIX = "/_planner_targets/", "/_planner_reports/"


class VirtualReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a kind, and the number of the last order that its program has accepted."""

    state: KindState
    number: int = 0


class VirtualConnector(Connector):
    """Puts orders into discovery, and reads there how far they are."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._namespace = f"{runtime.settings.runtime.namespace}/"
        self._targets: dict[str, Order] = {}

    async def observe(self) -> Mapping[str, KindState]:
        prefix = REPORTS_PREFIX + self._namespace
        kinds = {}
        for key, value in (await self._runtime.discovery.get(prefix)).items():
            kind = key.removeprefix(prefix)
            try:
                report = msgspec.json.decode(value, type=VirtualReport)
            except DECODE_ERRORS:
                raise PlaneUnavailable(f"the report of {kind} cannot be read") from None
            target, kinds[kind] = self._targets.get(kind), report.state
            if target is not None and report.number < target.number:  # ordered, not accepted yet
                kinds[kind] = msgspec.structs.replace(report.state, wanted=target.count)
        if not kinds:
            raise NotFound("no program reports workers to the planner", hint=f"put {prefix}KIND")
        return kinds

    async def scale(self, order: Order) -> None:
        prefix = REPORTS_PREFIX + self._namespace
        if prefix + order.kind not in await self._runtime.discovery.get(prefix):
            raise NotFound(f"no program reports workers of the kind {order.kind}")
        last = self._targets.get(order.kind)
        if last is not None and order.number <= last.number:
            return
        key = TARGETS_PREFIX + self._namespace + order.kind
        await self._runtime.discovery.put(key, msgspec.json.encode(order))
        self._targets[order.kind] = order
