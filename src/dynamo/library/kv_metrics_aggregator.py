"""KvMetricsAggregator: the load of every worker of a component, as a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from dynamo.communication.events import Event
from dynamo.core.values import Load, sum_loads
from dynamo.runtime.component import Component
from dynamo.scheduling.workers.load_view import LoadView


class KvMetricsAggregator:
    """Use as `async with KvMetricsAggregator(component)`, or call `start` and `close`."""

    def __init__(self, component: Component) -> None:
        self._runtime = component.namespace.runtime
        self._component = f"{component.namespace.name}.{component.name}"
        self._loads = LoadView(self._runtime.clock)

    async def start(self) -> None:
        """Subscribe to the load reports of all present and future workers."""
        await self._loads.subscribe(self._runtime.events, self._component)

    def close(self) -> None:
        """End the subscription."""
        self._loads.close()

    def update_scores(self, event: Event) -> None:
        """Apply one `load_metrics` event. Subscribed events are applied without this call."""
        self._loads.update_scores(event)

    def workers(self) -> Mapping[str, Load]:
        """Return the last report of each worker."""
        return dict(self._loads.loads)

    def total(self) -> Load:
        """Return the sum of all last reports."""
        return sum_loads(self._loads.loads.values())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
