"""Runs a graph of services inside one process, for tests: `async with local(Root) as graph`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, cast

from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.runtime import DistributedRuntime
from dynamo.sdk import walk
from dynamo.sdk.handle import connect_service
from dynamo.sdk.serving import start_service

T = TypeVar("T")
_graph_numbers = itertools.count()


class LocalGraph:
    """A running graph. `graph[Service]` is a handle of the service."""

    def __init__(self, handles: Mapping[type[Any], Any], instances: Mapping[type[Any], list[Any]]):
        self._handles = handles
        self._instances = instances

    def __getitem__(self, service: type[T]) -> T:
        return cast("T", self._handles[service])

    def instances(self, service: type[T]) -> list[T]:
        """Return the service's own objects, one for each replica."""
        return list(self._instances[service])


@asynccontextmanager
async def local(
    root: type[Any],
    *,
    config: Mapping[str, Mapping[str, Any]] | None = None,
    fakes: Mapping[type[Any], Any] | None = None,
    replicas: int = 1,
) -> AsyncIterator[LocalGraph]:
    """Run `root` and all services that it depends on or links to, each in its own runtime.

    The runtimes share memory planes, which have the same calls, streams, credit and errors as
    planes between processes. `config` holds sections by service name. `fakes` replaces services by
    objects with methods named after the endpoints; services that only a fake would call are not
    started. `replicas` applies to every service.
    """
    discovery = f"memory:local-{next(_graph_numbers)}"
    settings = Settings(
        runtime=RuntimeSettings(discovery=discovery, requests="memory:", events="memory:")
    )
    fake_services = dict(fakes or {})
    services = _reachable_services(root, fake_services)
    instances: dict[type[Any], list[Any]] = {}
    async with AsyncExitStack() as stack:

        async def open_runtime(role: str) -> DistributedRuntime:
            runtime = await DistributedRuntime.create(settings, role=role)
            stack.push_async_callback(runtime.shutdown, 0.0)
            return runtime

        for service in reversed(services):
            section = (config or {}).get(service.__name__, {})
            for _ in range(1 if service in fake_services else replicas):
                runtime = await open_runtime(service.__name__)
                fake = fake_services.get(service)
                attached = await start_service(service, runtime, section, service_object=fake)
                instances.setdefault(service, []).append(attached.service)
        caller = await open_runtime("test")
        handles = {service: await connect_service(service, caller) for service in services}
        yield LocalGraph(handles, instances)


def _reachable_services(root: type[Any], fakes: Mapping[type[Any], Any]) -> list[type[Any]]:
    """Return the graph in calling order, without the services that only fakes would call."""
    from dynamo.sdk.graph import direct_dependencies

    reached = {root}
    order = walk(root)
    for service in order:
        if service in reached and service not in fakes:
            reached.update(direct_dependencies(service))
    return [service for service in order if service in reached]
