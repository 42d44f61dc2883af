"""The merged metrics of all frontends that share an HTTP port."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynamo.communication.http.scrape import scrape
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import run_all
from dynamo.runtime.deployment import ProcessRecord, deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.scrape_targets import ScrapeTarget, ScrapeTargets
from dynamo.telemetry import render_merged

log = logging.getLogger(__name__)


class SharedPortMetrics:
    """Scrapes the other frontends of this deployment, found by their process records."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._deployment = deployment_of(runtime.settings)
        self._targets = ScrapeTargets(runtime)

    async def render(self) -> str:
        """Return the metrics of all frontends as if of one process. A frontend that does not answer
        in time is left out, with a warning."""
        own = self._runtime.metrics.render()
        if self._runtime.settings.server.http_workers == 1:
            return own
        others = await self._other_frontends()
        texts = await run_all(*(self._scrape(other.status_url) for other in others))
        return render_merged([own, *filter(None, texts)])

    async def list_targets(self) -> Sequence[ScrapeTarget]:
        """Return the status ports of all processes. Raises `PlaneUnavailable`."""
        return await self._targets.list_targets()

    async def _other_frontends(self) -> Sequence[ProcessRecord]:
        processes = await self._runtime.clock.offload(self._deployment.live_processes)
        frontends = (process for process in processes if process.role == "frontend")
        own_id = self._runtime.instance_id
        return [other for other in frontends if other.instance != own_id and other.status_url]

    async def _scrape(self, status_url: str) -> str:
        try:
            return await scrape(status_url)
        except PlaneUnavailable as error:
            fields = {"url": status_url, "error": error.message}
            log.warning("a frontend's metrics are missing", extra={"fields": fields})
            return ""
