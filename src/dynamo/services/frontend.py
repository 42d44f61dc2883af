"""The frontend process: HTTP, processor and router for every model that workers announce."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.application import Application, Gateway
from dynamo.application.large_bodies import default_body_bytes
from dynamo.application.responses.store import FILE_NAME as RESPONSES_FILE
from dynamo.application.responses.store import ResponseStore
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.adapters import AdapterOrders
from dynamo.services.embedding_models import EmbeddingModelWatcher
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.processor import ProcessorEndpoints
from dynamo.services.routing import ProcessRouting
from dynamo.services.routing_queries import RoutingQueries
from dynamo.services.service_models import ServiceModelWatcher
from dynamo.services.shared_metrics import SharedPortMetrics

log = logging.getLogger(__name__)


MODELS_TIMEOUT_S = 10.0
"""A frontend that shares its port waits up to this long for the announced models to be open."""


class FrontendService:
    """Serves all announced models over HTTP until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start serving. Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        gateway = Gateway()
        self._routing = routing = ProcessRouting(runtime)
        queries = RoutingQueries(runtime, routing)
        self._model_watcher = ModelWatcher(runtime, gateway, routing)
        server = runtime.settings.server
        application = self._open_application(gateway, queries)
        http = HttpServer(
            application.handle,
            HttpLimits.from_settings(server),
            runtime.clock,
            on_error=application.on_error,
            check_headers=application.check_headers,
        )
        host = server.http_host
        if not server.max_body_bytes:
            gateway.on_change(lambda: self._set_body_limit(http, gateway))
        self._model_watcher.start()
        EmbeddingModelWatcher(runtime, gateway).start()
        if runtime.supervisor:  # other frontends on this port may serve the models already
            await self._model_watcher.wait_until_opened(MODELS_TIMEOUT_S)
        runtime.on_serving()  # a frontend that listens and hangs takes its share of connections
        port = await http.start(host, server.http_port, reuse_port=bool(runtime.supervisor))
        runtime.on_leaving = lambda drain_s: http.leave(
            min(drain_s, runtime.settings.server.leave_s), drain_s
        )
        runtime.add_shutdown_hook(http.stop)
        runtime.public_address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        ServiceModelWatcher(runtime, gateway).start()
        await ProcessorEndpoints(runtime, gateway).start()
        await queries.start()
        runtime.metrics.gauge(
            "dynamo_frontend_workers",
            "Instances that serve a model",
            ("model",),
            callback=self._workers_by_label,
            merge="max",
        )
        log.info("frontend listens", extra={"fields": {"url": runtime.public_address}})

    def _open_application(self, gateway: Gateway, queries: RoutingQueries) -> Application:
        runtime = self._runtime
        application = Application(
            runtime.settings.server,
            gateway,
            runtime.clock,
            runtime.metrics,
            reasons=lambda: runtime.health.reasons,
            facts=self._health_facts,
            metrics_source=SharedPortMetrics(runtime),
            routing=queries,
            share_cache=runtime.settings.engine.share_cache,
            response_store=_response_store(runtime),
            adapter_orders=(
                AdapterOrders(runtime, gateway) if runtime.settings.engine.lora_updates else None
            ),
        )
        runtime.add_shutdown_hook(application.close)

        def apply_settings(settings: Settings) -> None:
            application.update_settings(settings.server, settings.router.ttft_slo)

        apply_settings(runtime.settings)
        runtime.on_settings_change(apply_settings)
        return application

    @staticmethod
    def _set_body_limit(http: HttpServer, gateway: Gateway) -> None:
        http.budget.max_body_bytes = default_body_bytes(gateway.context_tokens)

    def _workers_by_label(self) -> Mapping[tuple[str, ...], float]:
        return {(name,): count for name, count in self._model_watcher.count_workers().items()}

    def _health_facts(self) -> Mapping[str, Any]:
        """Return the fields of /health that this process adds."""
        return {
            "workers": self._model_watcher.count_workers(),
            "prefill": self._model_watcher.prefill_workers(),
            "namespace": self._runtime.settings.runtime.namespace,
            "refused_workers": self._model_watcher.incompatible_workers(),
            "unreachable_workers": self._model_watcher.unreachable_workers(),
            "routing": self._routing.view_modes(),
            "routers": self._routing.router_states(),
            "planes": self._runtime.plane_status(),
            "instance": self._runtime.instance_id,
        }


def _response_store(runtime: DistributedRuntime) -> ResponseStore:
    """Return the store in the state folder of the deployment, which its frontends share."""

    def path() -> Path:
        deployment = deployment_of(runtime.settings)
        deployment.create_folder()
        return deployment.folder / RESPONSES_FILE

    return ResponseStore(path, runtime.settings.responses, runtime.clock.wall)
