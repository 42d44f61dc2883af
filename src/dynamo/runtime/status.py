"""The status port of every process: /health, /live and /metrics, on an ephemeral port."""

from __future__ import annotations

from typing import Any

import msgspec

import dynamo
from dynamo.communication.http import HttpLimits, HttpServer, Request, Response
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.telemetry.process import add_process_metrics

JSON = (("content-type", "application/json"),)
PROMETHEUS = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)
RETRY_S = 1


class StatusServer:
    """Serves what the runtime knows of its process."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._started = runtime.clock.now()
        limits = HttpLimits.of(runtime.settings.server)
        self._http = HttpServer(self._answer, limits, runtime.clock)
        self.url = ""
        add_process_metrics(runtime.metrics)

    async def start(self) -> None:
        """Listen on any free port of `runtime.status_host`; `url` says where."""
        host = self._runtime.settings.runtime.status_host
        port = await self._http.start(host, 0)
        self.url = f"http://{_bracketed(host)}:{port}"

    async def stop(self) -> None:
        """Close the port."""
        await self._http.stop(0)

    def health(self) -> dict[str, Any]:
        """What /health says."""
        runtime = self._runtime
        reasons = dict(runtime.health.reasons)
        if runtime.lifecycle.stopping:
            reasons["stopping"] = "the process is draining"
        return {
            "status": "unhealthy" if reasons else "healthy",
            "reasons": reasons,
            "state": str(runtime.lifecycle.state),
            "version": dynamo.__version__,
            "uptime": uptime(runtime.clock.now() - self._started),
            "role": runtime.role,
            "name": runtime.name,
            "instance": runtime.instance_id,
            "endpoints": {
                served.endpoint.path: str(served.lifecycle.state) for served in runtime.served
            },
        }

    async def _answer(self, request: Request, response: Response) -> None:
        if request.method not in {"GET", "HEAD"}:
            response.send(405, (*JSON, ("allow", "GET")), b'{"error": "only GET"}')
        elif request.path == "/live":
            response.send(200, JSON, b'{"status": "live"}')
        elif request.path == "/health":
            body = self.health()
            status = 503 if body["reasons"] else 200
            again = (("retry-after", str(RETRY_S)),) if status == 503 else ()
            response.send(status, (*JSON, *again), msgspec.json.encode(body))
        elif request.path == "/metrics":
            response.send(200, PROMETHEUS, self._runtime.metrics.render().encode())
        else:
            response.send(404, JSON, b'{"error": "/health, /live and /metrics are here"}')


def uptime(seconds: float) -> str:
    """`00:05:23`; hours go on counting past a day."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
