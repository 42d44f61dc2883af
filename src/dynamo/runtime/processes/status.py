"""The status port of every process: /health, /live, /ready, and /metrics of that process alone."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import dynamo
from dynamo.communication.addresses import advertised_host, bracket_ipv6, is_loopback
from dynamo.communication.http import (
    RESERVED_FROM_STATUS,
    HttpLimits,
    HttpServer,
    PortInUse,
    Request,
    Response,
    WebAccess,
    count_open_descriptors,
)
from dynamo.communication.http.scrape import scrape
from dynamo.core.clock import Clock
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo.telemetry import Registry, render_merged
from dynamo.telemetry.health import HealthReport, ready_answer
from dynamo.telemetry.openmetrics import exposition
from dynamo.telemetry.stderr import dropped_lines

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.runtime.processes.child import ChildProcess
    from dynamo.runtime.processes.supervisor_metrics import ScrapedProcess

JSON_HEADERS = (("content-type", "application/json"),)
log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
PORT_ATTEMPTS = 256
"""Number of ports that are tried, from `runtime.status_port` upwards."""


class StatusServer:
    """Serves /health, /live, /ready and /metrics. /metrics/all has the metrics of this process and
    of those that `list_processes` returns, merged. `reasons` returns why the process is unhealthy
    by name, `details` the other fields of /health, and `ready` why no requests should come to it.
    `public_url` is the URL for other hosts; a port on loopback has none, and its `url` instead."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        metrics: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]],
        details: Callable[[], Mapping[str, Any]],
        ready: Callable[[], str],
    ) -> None:
        self._ready = ready
        self._host = settings.runtime.status_host
        self._port = settings.runtime.status_port
        self._public_host = settings.runtime.public_host
        self._metrics = metrics
        self._report = HealthReport(clock, reasons, details)
        web_access = WebAccess.of_status_port(self._host, settings.server)
        self._http = HttpServer(
            self._handle,
            HttpLimits.without_bodies(settings.server),
            clock,
            check_headers=web_access.check,
            reserved_descriptors=RESERVED_FROM_STATUS,
        )
        self.list_processes: Callable[[], Sequence[ScrapedProcess]] = tuple
        self.url = self.public_url = ""
        add_process_metrics(metrics)

    async def start(self) -> None:
        """Listen on `runtime.status_port` or the next free port above it (0: any free port), and
        set the URLs. Raises `PortInUse`."""
        for port in range(self._port, self._port + PORT_ATTEMPTS if self._port else 1):
            with suppress(PortInUse):
                bound_port = await self._http.start(self._host, port)
                public_host = self._host
                if not is_loopback(self._host):
                    public_host = advertised_host(self._host, self._public_host)
                self.url = f"http://{bracket_ipv6(self._host)}:{bound_port}"
                self.public_url = f"http://{bracket_ipv6(public_host)}:{bound_port}"
                return
        raise PortInUse(self._host, self._port)

    async def stop(self) -> None:
        """Close the port."""
        await self._http.stop(0)

    async def _handle(self, request: Request, response: Response) -> None:
        if request.method not in {"GET", "HEAD"}:
            response.send(405, (*JSON_HEADERS, ("allow", "GET")), b'{"error": "only GET"}')
        elif request.path == "/live":
            response.send(200, JSON_HEADERS, b'{"status": "live"}')
        elif request.path == "/ready":
            status, answer = ready_answer(self._ready())
            response.send(status, JSON_HEADERS, answer)
        elif request.path == "/health":
            body = self._report.body()
            status = 503 if body["reasons"] else 200
            retry = (("retry-after", str(RETRY_AFTER_S)),) if status == 503 else ()
            response.send(status, (*JSON_HEADERS, *retry), msgspec.json.encode(body))
        elif request.path == "/metrics":
            self._send_metrics(request, response, self._metrics.render())
        elif request.path == "/metrics/all":
            self._send_metrics(request, response, await self._render_all())
        elif request.path == "/favicon.ico":  # browsers ask for it and show a 404 as an error
            response.send(204, (), b"")
        else:
            response.send(404, JSON_HEADERS, b'{"error": "use /health, /live, /ready or /metrics"}')

    def _send_metrics(self, request: Request, response: Response, text: str) -> None:
        exemplars = self._metrics.exemplars()
        content_type, body = exposition(text, request.header(b"accept"), exemplars)
        response.send(200, (("content-type", content_type),), body)

    async def _render_all(self) -> str:
        """Return the merged metrics. A process that does not answer in time is left out."""
        texts = await run_all(*(_scrape(each) for each in self.list_processes()))
        return render_merged([self._metrics.render(), *texts])


async def _scrape(process: ScrapedProcess) -> str:
    try:
        return await scrape(process.status_url)
    except PlaneUnavailable as error:
        fields = {"process": process.name, "error": error.message}
        log.warning("the metrics of a process are missing", extra={"fields": fields})
        return ""


SHARED_SECTIONS = ("router", "index", "sampling", "discovery", "messaging", "nixl", "logging")


def unready_reason(children: Sequence[ChildProcess], reasons: Mapping[str, str]) -> str:
    """Return why no request should come to a deployment. A process that serves is enough, and a
    deployment that stops takes none."""
    serves = any(child.ready or child.sleeping for child in children)
    if serves and "stopping" not in reasons:
        return ""
    return reasons.get("stopping") or "; ".join(reasons.values()) or "no process serves"


def settings_hash(settings: Settings) -> str:
    """Return a hash of the settings that all processes of a deployment have in common."""
    sections = [getattr(settings, name) for name in SHARED_SECTIONS]
    return hashlib.sha256(msgspec.json.encode(sections)).hexdigest()[:12]


def status_server_of(runtime: DistributedRuntime) -> StatusServer:
    """Create the status server of a process with a runtime."""

    def reasons() -> Mapping[str, str]:
        stopping = {"stopping": "the process is draining"} if runtime.stopping.cancelled else {}
        return {**runtime.health.reasons, **stopping}

    def ready() -> str:
        return "; ".join(reasons().values()) if runtime.ready is None else runtime.ready()

    def details() -> Mapping[str, Any]:
        return {
            "state": str(runtime.lifecycle.state),
            "role": runtime.role,
            "name": runtime.name,
            "namespace": runtime.settings.runtime.namespace,
            "instance": runtime.instance_id,
            "planes": runtime.plane_status(),
            "config": settings_hash(runtime.settings),
            "limitations": runtime.health.limitations,
            "endpoints": {
                served.endpoint.path: str(served.lifecycle.state)
                for served in runtime.served_endpoints
            },
        }

    runtime.metrics.gauge(
        "dynamo_config_info",
        "1, with a hash of the settings that all processes of a deployment share",
        ("hash",),
        callback=lambda: {(settings_hash(runtime.settings),): 1},
        merge="max",
    )
    return StatusServer(
        runtime.settings,
        runtime.clock,
        runtime.metrics,
        reasons=reasons,
        details=details,
        ready=ready,
    )


def add_process_metrics(registry: Registry) -> None:
    """Add CPU time, memory, open files and start time, read from Linux's /proc at each scrape, and
    the number of dropped log lines."""
    registry.counter(
        "process_cpu_seconds_total", "CPU time, user and system", callback=time.process_time
    )
    registry.gauge("process_resident_memory_bytes", "memory in RAM", callback=_resident_bytes)
    registry.gauge("process_open_fds", "open files and sockets", callback=count_open_descriptors)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    registry.gauge("process_max_fds", "limit of open files", callback=lambda: limit[0], merge="max")
    registry.gauge("process_threads", "threads", callback=_count_threads)
    build = (dynamo.__version__, platform.python_version())
    registry.gauge(
        "dynamo_build_info",
        "1, with the versions of Dynamo and Python",
        ("version", "python"),
        callback=lambda: {build: 1},
        merge="max",
    )
    registry.counter(
        "dynamo_log_lines_dropped_total",
        "Log lines that were dropped because nobody read stderr",
        callback=dropped_lines,
    )
    started = time.time()
    registry.gauge(
        "process_start_time_seconds",
        "start time, Unix seconds",
        callback=lambda: started,
        merge="max",
    )


def _count_threads() -> int:
    """Return the number of threads, also of those that libraries have started."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names are enough


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
