"""The HTTP port of a router process or an observer, and where observers listen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dynamo.application.app import RouterApplication
from dynamo.application.routes import Route
from dynamo.communication.addresses import bracket_ipv6
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.core.errors import NotFound
from dynamo.runtime.distributed import DistributedRuntime

OBSERVERS_PREFIX = "/_observers/"
"""The prefix of the keys of observers in discovery; the namespace and the instance follow."""


async def serve_pages(
    runtime: DistributedRuntime,
    host: str,
    port: int,
    routes: Mapping[str, Mapping[str, Route]],
    facts: Callable[[], Mapping[str, Any]],
    *,
    page_path: str,
    open_pages: Mapping[str, Mapping[str, Route]] = MappingProxyType({}),
    reuse_port: bool = False,
) -> None:
    """Answer requests without bodies until the runtime shuts down. Its `public_address` becomes the
    URL. `facts` are shown in `/health`. Browsers get from / to `page_path`; `open_pages` need no
    key. `reuse_port`: see `HttpServer.start`. Raises `PortInUse`, `ConfigError`."""
    server = runtime.settings.server
    application = RouterApplication(
        server,
        host,
        routes,
        runtime.clock,
        runtime.metrics,
        reasons=lambda: runtime.health.reasons,
        facts=facts,
        page_path=page_path,
        open_pages=open_pages,
    )
    http = HttpServer(
        application.handle,
        HttpLimits.without_bodies(server),
        runtime.clock,
        on_error=application.on_error,
        check_headers=application.check_headers,
    )
    port = await http.start(host, port, reuse_port=reuse_port)
    runtime.add_shutdown_hook(http.stop)
    runtime.public_address = f"http://{bracket_ipv6(host)}:{port}"


async def find_observer_url(runtime: DistributedRuntime) -> str:
    """Return the HTTP URL of an observer of the namespace. Raises `NotFound`, and the errors of
    discovery."""
    prefix = f"{OBSERVERS_PREFIX}{runtime.settings.runtime.namespace}/"
    observers = await runtime.discovery.get(prefix)
    if not observers:
        raise NotFound(
            "no observer runs, which keeps what became of requests",
            hint="start the deployment without --no-observer, or wait until it has started",
        )
    return observers[min(observers)].decode()
