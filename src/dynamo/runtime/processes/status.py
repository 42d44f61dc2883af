"""The status port of every process: /health, /live and /metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.communication.http import HttpLimits, HttpServer, PortInUse, Request, Response
from dynamo.core.clock import Clock
from dynamo.core.settings import Settings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.telemetry import Registry
from dynamo.telemetry.health import HealthReport
from dynamo.telemetry.metrics import PROMETHEUS_CONTENT_TYPE
from dynamo.telemetry.process_metrics import add_process_metrics

JSON_HEADERS = (("content-type", "application/json"),)
RETRY_AFTER_S = 1
PORT_ATTEMPTS = 256
"""How many are tried from `runtime.status_port` on."""


class StatusServer:
    """`reasons`: why the process is not well, by name; `about`: what else /health tells."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]],
        details: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._host = settings.runtime.status_host
        self._port = settings.runtime.status_port
        self._metrics = metrics
        self._report = HealthReport(clock, reasons, details)
        self._http = HttpServer(self._handle, HttpLimits.from_settings(settings.server), clock)
        self.url = ""
        add_process_metrics(metrics)

    async def start(self) -> None:
        """Listen at `runtime.status_host`, on `runtime.status_port` or the next free port above it
        (0: any free one); `url` says where. Raises `PortInUse`."""
        self.url = f"http://{_bracket_ipv6(self._host)}:{await self._listen()}"

    async def _listen(self) -> int:
        for port in range(self._port, self._port + PORT_ATTEMPTS if self._port else 1):
            try:
                return await self._http.start(self._host, port)
            except PortInUse:
                continue
        raise PortInUse(self._host, self._port)

    async def stop(self) -> None:
        """Close the port."""
        await self._http.stop(0)

    async def _handle(self, request: Request, response: Response) -> None:
        if request.method not in {"GET", "HEAD"}:
            response.send(405, (*JSON_HEADERS, ("allow", "GET")), b'{"error": "only GET"}')
        elif request.path == "/live":
            response.send(200, JSON_HEADERS, b'{"status": "live"}')
        elif request.path == "/health":
            body = self._report.body()
            status = 503 if body["reasons"] else 200
            again = (("retry-after", str(RETRY_AFTER_S)),) if status == 503 else ()
            response.send(status, (*JSON_HEADERS, *again), msgspec.json.encode(body))
        elif request.path == "/metrics":
            response.send(
                200, (("content-type", PROMETHEUS_CONTENT_TYPE),), self._metrics.render().encode()
            )
        else:
            response.send(404, JSON_HEADERS, b'{"error": "/health, /live and /metrics are here"}')


def status_server_of(runtime: DistributedRuntime) -> StatusServer:
    """The status port of a process with a runtime."""

    def reasons() -> Mapping[str, str]:
        stopping = {"stopping": "the process is draining"} if runtime.stopping.cancelled else {}
        return {**runtime.health.reasons, **stopping}

    def about() -> Mapping[str, Any]:
        return {
            "state": str(runtime.lifecycle.state),
            "role": runtime.role,
            "name": runtime.name,
            "instance": runtime.instance_id,
            "planes": runtime.plane_status(),
            "endpoints": {
                served.endpoint.path: str(served.lifecycle.state)
                for served in runtime.served_endpoints
            },
        }

    return StatusServer(
        runtime.settings, runtime.clock, runtime.metrics, reasons=reasons, details=about
    )


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host
