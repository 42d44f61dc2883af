"""The component registry: what discovery knows, by component."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dynamo.communication.discovery import Discovery
from dynamo.runtime.instances import Instance, decode_instance, workers_prefix


class ComponentRegistry:
    """A strongly consistent look at who serves what."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    async def components(self, namespace: str) -> Mapping[str, Sequence[Instance]]:
        """Instances by component; one process is an instance of each endpoint it serves."""
        found: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in await self.instances(namespace):
            found[instance.component].append(instance)
        return dict(found)

    async def instances(
        self, namespace: str, component: str = "", endpoint: str = ""
    ) -> Sequence[Instance]:
        """All instances of a namespace, of a component, of an endpoint. Bad entries are skipped."""
        records = await self._discovery.get(workers_prefix(namespace, component, endpoint))
        decoded = (decode_instance(key, value) for key, value in sorted(records.items()))
        return [instance for instance in decoded if instance is not None]
