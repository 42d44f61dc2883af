"""The frontend's process: HTTP, processor and router, for every model that workers announce."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynamo.application import Application, Gateway
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.models import Models
from dynamo.services.offered import Offers
from dynamo.services.processing import Processing
from dynamo.services.routing import Routing
from dynamo.services.routing_answers import RoutingAnswers
from dynamo.services.siblings import Siblings

log = logging.getLogger(__name__)


PATIENCE_S = 10.0


class Frontend:
    """Listens, follows the models, serves them until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        gateway = Gateway()
        self._routing = routing = Routing(runtime)
        answers = RoutingAnswers(runtime, routing)
        self._models = Models(runtime, gateway, routing)
        server = runtime.settings.server
        application = Application(
            server,
            gateway,
            runtime.clock,
            runtime.metrics,
            reasons=lambda: runtime.health.reasons,
            facts=self._facts,
            metrics_text=Siblings(runtime).metrics,
            routing=answers,
        )
        runtime.on_settings(lambda settings: application.limit(settings.server))
        http = HttpServer(
            application.handle,
            HttpLimits.of(server),
            runtime.clock,
            on_error=application.on_error,
        )
        host = server.http_host
        self._models.follow()
        if runtime.supervised:  # others may share the port and answer what this one cannot yet
            await self._models.opened(PATIENCE_S)
        port = await http.start(host, server.http_port, reuse_port=runtime.supervised)
        runtime.at_shutdown(http.stop)
        runtime.public_address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        Offers(runtime, gateway).follow()
        await Processing(runtime, gateway).start()
        await answers.start()
        runtime.metrics.gauge(
            "dynamo_frontend_workers",
            "Instances that serve a model",
            ("model",),
            callback=lambda: {(name,): count for name, count in self._models.workers().items()},
            merge="max",
        )
        log.info("frontend listens", extra={"fields": {"url": runtime.public_address}})

    def _facts(self) -> Mapping[str, Any]:
        """What only this process knows, for /health."""
        return {
            "workers": self._models.workers(),
            "refused_workers": self._models.refused(),
            "routing": self._routing.views(),
            "routers": self._routing.routers(),
            "planes": self._runtime.plane_facts(),
            "instance": self._runtime.instance_id,
        }
