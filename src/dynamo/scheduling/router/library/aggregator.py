"""KvMetricsAggregator: what every worker of a component does now, for programs of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from dynamo.communication.events import Event
from dynamo.core.values import Load, sum_loads
from dynamo.runtime.component import Component
from dynamo.scheduling.router.load_view import LoadView


class KvMetricsAggregator:
    """`async with KvMetricsAggregator(component) as metrics`, or `start` and `close`."""

    def __init__(self, component: Component) -> None:
        self._runtime = component.namespace.runtime
        self._component = f"{component.namespace.name}.{component.name}"
        self._loads = LoadView(self._runtime.clock)

    async def start(self) -> None:
        """Hear the load reports of every worker, present and future."""
        await self._loads.subscribe(self._runtime.events, self._component)

    def close(self) -> None:
        """Hear no more."""
        self._loads.close()

    def update_scores(self, event: Event) -> None:
        """One `load_metrics` event; what `start` hears comes here by itself."""
        self._loads.update_scores(event)

    def workers(self) -> Mapping[str, Load]:
        """The last report of each worker."""
        return dict(self._loads.loads)

    def total(self) -> Load:
        """All of them together."""
        return sum_loads(self._loads.loads.values())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
