"""The frontend process: HTTP, processor and router for every model that workers announce."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.application import Application, Gateway
from dynamo.application.frontend_metrics import FrontendMetrics
from dynamo.application.generation.stories import Stories
from dynamo.application.large_bodies import default_body_bytes
from dynamo.application.observer import ObserverRedirect
from dynamo.application.responses.store import FILE_NAME as RESPONSES_FILE
from dynamo.application.responses.store import ResponseStore
from dynamo.communication.addresses import bracket_ipv6
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.communication.http.scrape import scrape
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo.operations.observer.stages import STAGES
from dynamo.runtime.deployment import ProcessRecord, deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.adapters import AdapterOrders
from dynamo.services.desired_models import STATES
from dynamo.services.embedding_models import EmbeddingModelWatcher
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.observing.pages import find_observer_url
from dynamo.services.observing.publisher import StoryPublisher
from dynamo.services.observing.slo_counter import promised_ttft_s
from dynamo.services.observing.trace_export import TraceOptions
from dynamo.services.planning.record import RECORD_FOLDER, RecordFiles, RequestRecorder
from dynamo.services.processor import ProcessorEndpoints
from dynamo.services.routing import ProcessRouting
from dynamo.services.scrape_targets import ScrapeTarget, ScrapeTargets
from dynamo.services.service_models import ServiceModelWatcher
from dynamo.telemetry import render_merged
from dynamo.telemetry.gpus import Gpus
from dynamo.telemetry.story import StoryListener


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


log = logging.getLogger(__name__)


MODELS_TIMEOUT_S = 10.0
"""A frontend that shares its port waits up to this long for the announced models to be open."""


class FrontendService:
    """Serves all announced models over HTTP until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start serving. Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        self._was_routable = False
        self._gpus = Gpus()
        gateway = Gateway()
        self._routing = routing = ProcessRouting(runtime)
        self._model_watcher = ModelWatcher(runtime, gateway, routing)
        server = runtime.settings.server
        runtime.ready = self._unready_reason
        application = self._open_application(gateway)
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
        self._watch_models(gateway, application)
        if runtime.supervisor:  # other frontends on this port may serve the models already
            await self._model_watcher.wait_until_opened(MODELS_TIMEOUT_S)
        runtime.on_serving()  # a frontend that listens and hangs takes its share of connections
        port = await http.start(host, server.http_port, reuse_port=bool(runtime.supervisor))
        runtime.on_leaving = lambda drain_s: _leave(runtime, http, drain_s)
        runtime.add_shutdown_hook(lambda drain_s: self._stop(drain_s, http, application))
        runtime.public_address = f"http://{bracket_ipv6(host)}:{port}"
        ServiceModelWatcher(runtime, gateway).start()
        await ProcessorEndpoints(runtime, gateway).start()
        if self._publisher is not None:
            await self._publisher.start()
        self._declare_metrics()
        log.info("frontend listens", extra={"fields": {"url": runtime.public_address}})

    def _watch_models(self, gateway: Gateway, application: Application) -> None:
        """Follow the models, and let those that are removed end their requests."""
        watcher, limits = self._model_watcher, application.generation.concurrency
        embedding_models = EmbeddingModelWatcher(
            self._runtime, gateway, watcher.desired, watcher.uses
        )
        watcher.other_states = embedding_models.states

        def take_requests(model: str) -> Callable[[], int]:
            limit = limits.pop(model, None)
            return lambda: limit.running + limit.waiting if limit is not None else 0

        def report_models() -> None:
            names = dict(gateway.unloaded_names())
            names |= {name: model.names[0] for name, model in gateway.embedding_models.items()}
            names |= {name: model.names[0] for name, model in gateway.models.items()}
            for model in gateway.models.values():
                application.metrics.begin_model(model.names[0], application.generation_paths)
            for embeds in gateway.embedding_models.values():
                application.metrics.for_model(embeds.names[0])
            self._runtime.report(models=names)

        gateway.on_change(report_models)
        gateway.describe = watcher.describe
        watcher.take_requests = embedding_models.take_requests = take_requests
        watcher.on_closed = application.metrics.remove_model
        watcher.start()
        embedding_models.start()

    def _declare_metrics(self) -> None:
        metrics = self._runtime.metrics
        metrics.gauge(
            "dynamo_frontend_workers",
            "Instances that serve a model",
            ("model",),
            callback=self._workers_by_label,
            merge="max",
        )
        metrics.gauge(
            "dynamo_frontend_unusable_workers",
            "Announced workers that get no requests: refused, unreachable or ejected",
            ("reason",),
            callback=lambda: {
                (reason,): count for reason, count in self._model_watcher.count_unusable().items()
            },
            merge="max",
        )
        metrics.gauge(
            "dynamo_model_state",
            "1 for the state of a model: loaded, loading, sleeping, unloaded or failed; 0 for the "
            "others",
            ("model", "state"),
            callback=self._states_by_label,
            merge="max",
        )

    def _open_application(self, gateway: Gateway) -> Application:
        runtime = self._runtime
        orders = AdapterOrders(runtime, gateway)
        runtime.execute_order = orders.execute
        application = Application(
            runtime.settings.server,
            gateway,
            runtime.clock,
            runtime.metrics,
            metrics=FrontendMetrics(
                runtime.metrics,
                ttft_promise_s=promised_ttft_s(runtime.settings),
                gap_promise_s=runtime.settings.observer.gap_slo,
                stage_names=STAGES if runtime.settings.observer.enabled else (),
                custom=runtime.settings.monitoring.custom_metrics,
            ),
            reasons=lambda: runtime.health.reasons,
            facts=self._health_facts,
            ready=self._unready_reason,
            metrics_source=SharedPortMetrics(runtime),
            locate_console=lambda: find_observer_url(runtime),
            pages=ObserverRedirect(lambda: find_observer_url(runtime)).routes(),
            share_cache=runtime.settings.engine.share_cache,
            response_store=_response_store(runtime),
            adapter_orders=orders if runtime.settings.engine.lora_updates else None,
        )
        self._recorder = _request_recorder(runtime)
        self._publisher: StoryPublisher | None = None
        listeners: list[StoryListener] = []
        if self._recorder is not None:
            self._recorder.start()
            listeners.append(self._recorder.add)
        if runtime.settings.observer.enabled:
            self._publisher = StoryPublisher(runtime, self._routing.sample, application.metrics)
            listeners.append(self._publisher.add)
        if self._publisher is not None and (options := TraceOptions.from_environ(os.environ)):
            application.trace_ratio, self._publisher.exports = options.ratio, True
        if listeners:
            application.generation.stories = Stories(listeners, runtime.clock)

        def apply_settings(settings: Settings) -> None:
            application.update_settings(settings.server, settings.router.ttft_slo)

        apply_settings(runtime.settings)
        runtime.on_settings_change(apply_settings)
        return application

    async def _stop(self, drain_s: float, http: HttpServer, application: Application) -> None:
        await run_all(http.stop(drain_s), application.close(drain_s))
        if (stories := application.generation.stories) is not None:
            stories.flush()
        if self._recorder is not None:
            await self._recorder.close()
        if self._publisher is not None:
            await self._publisher.close()

    def _unready_reason(self) -> str:
        """Return why requests should not come. Once a model could be routed, the frontend is ready
        until it stops: later outages of workers are answered in words."""
        if self._runtime.stopping.cancelled:
            return "the frontend is stopping"
        if not self._was_routable:
            reason = self._model_watcher.unroutable_reason()
            self._was_routable = not reason
            return reason
        return ""

    @staticmethod
    def _set_body_limit(http: HttpServer, gateway: Gateway) -> None:
        http.budget.max_body_bytes = default_body_bytes(gateway.context_tokens)

    def _workers_by_label(self) -> Mapping[tuple[str, ...], float]:
        return {(name,): count for name, count in self._model_watcher.count_workers().items()}

    def _states_by_label(self) -> Mapping[tuple[str, ...], float]:
        states = self._model_watcher.model_states().items()
        return {(name, each): each == state.state for name, state in states for each in STATES}

    def _health_facts(self) -> Mapping[str, Any]:
        """Return the fields of /health that this process adds."""
        states = self._model_watcher.model_states()
        return {
            "gpu_memory_usage": self._gpus.memory_usage(),
            "model_states": {name: state._asdict() for name, state in states.items()},
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


async def _leave(runtime: DistributedRuntime, http: HttpServer, drain_s: float) -> None:
    """Let clients go elsewhere. Behind a Service new ones come for some time, and are accepted."""
    leave_s = min(drain_s, runtime.settings.server.leave_s)
    if runtime.planes.behind_service:
        await runtime.clock.sleep(leave_s)
        drain_s -= leave_s
    await http.leave(min(leave_s, drain_s), drain_s)


def _response_store(runtime: DistributedRuntime) -> ResponseStore:
    """Return the store in the state folder of the deployment, which its frontends share."""

    def path() -> Path:
        return _state_folder(runtime) / RESPONSES_FILE

    return ResponseStore(path, runtime.settings.responses, runtime.clock.wall)


def _request_recorder(runtime: DistributedRuntime) -> RequestRecorder | None:
    """Return the recorder of this process; None if `record.enabled` is off."""
    settings = runtime.settings.record
    if not settings.enabled:
        return None

    def folder() -> Path:
        return _state_folder(runtime) / RECORD_FOLDER

    files = RecordFiles(folder, runtime.instance_id, settings, runtime.clock)
    return RequestRecorder(files, runtime.clock, runtime.metrics)


def _state_folder(runtime: DistributedRuntime) -> Path:
    """Return the state folder of the deployment, made if it is missing. Raises `ConfigError`."""
    deployment = deployment_of(runtime.settings)
    deployment.create_folder()
    return deployment.folder
