"""The routes /health, /live, /ready, /version, /metrics, /metrics/targets and /v1/models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

import dynamo
from dynamo.application.exchange import Exchange
from dynamo.application.gateway import Gateway, ServedEmbeddingModel, ServedModel
from dynamo.application.routes import Route
from dynamo.core.clock import Clock
from dynamo.telemetry.health import HealthReport, ready_answer
from dynamo.telemetry.metrics import Registry
from dynamo.telemetry.openmetrics import exposition


class MetricsSource(Protocol):
    """The metrics of several processes: `services.shared_metrics.SharedPortMetrics`."""

    async def render(self) -> str: ...
    async def list_targets(self) -> Sequence[Any]: ...


class StatusHandler:
    """Reports the state of this process.

    `reasons` returns why the process is unhealthy; `facts` returns more fields of /health. `ready`
    returns why requests should not come here yet, or any more.
    `metrics_source` knows the other processes. None renders this process alone and leaves out
    /metrics/targets.
    """

    def __init__(
        self,
        clock: Clock,
        registry: Registry,
        *,
        reasons: Callable[[], Mapping[str, str]],
        facts: Callable[[], Mapping[str, Any]],
        ready: Callable[[], str],
        metrics_source: MetricsSource | None = None,
    ) -> None:
        self._ready = ready
        self._report = HealthReport(clock, reasons, facts)
        self._registry = registry
        self._metrics_source = metrics_source

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        """Return the routes by path and method."""
        routes = {
            "/health": {"GET": self.health},
            "/live": {"GET": self.live},
            "/ready": {"GET": self.ready},
            "/metrics": {"GET": self.metrics},
            "/version": {"GET": self.version},
        }
        if self._metrics_source is not None:
            routes |= {"/metrics/targets": {"GET": self.targets}}
        return routes

    async def health(self, exchange: Exchange) -> None:
        """GET /health: 200 if a request would be served, otherwise 503."""
        body = self._report.body()
        retry = (("retry-after", "1"),) if body["reasons"] else ()
        exchange.send_json(503 if retry else 200, msgspec.json.encode(body), retry)

    async def live(self, exchange: Exchange) -> None:
        """GET /live: 200 while the process answers."""
        exchange.send_json(200, b'{"status":"live"}')

    async def ready(self, exchange: Exchange) -> None:
        """GET /ready: 200 while requests should come here, otherwise 503."""
        exchange.send_json(*ready_answer(self._ready()))

    async def version(self, exchange: Exchange) -> None:
        """GET /version."""
        exchange.send_value({"version": dynamo.__version__})

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        source = self._metrics_source
        text = self._registry.render() if source is None else await source.render()
        accept = exchange.request.header(b"accept")
        exchange.send(*exposition(text, accept, self._registry.exemplars()))

    async def targets(self, exchange: Exchange) -> None:
        """GET /metrics/targets: the status ports to scrape, for Prometheus' http_sd_configs."""
        source = self._metrics_source
        targets = [] if source is None else await source.list_targets()
        exchange.send_value(targets)


class ModelsHandler:
    """Lists models that are served or to be served. Each alias is listed as a model whose `root` is
    the model's id."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def list_models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        self._gateway.require_ready()
        gateway, states = self._gateway, self._gateway.describe()
        data = [_model_body(name, served, states) for name, served in gateway.models.items()]
        embedding_models = gateway.embedding_models.items()
        data += [_model_body(name, served, states) for name, served in embedding_models]
        data += [_closed_body(name, *own, states) for name, own in gateway.closed_names().items()]
        exchange.send_value({"object": "list", "data": data})

    async def get_model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}; an id may contain slashes."""
        name = exchange.request.path.removeprefix("/v1/models/")
        states = self._gateway.describe()
        embedding_model = self._gateway.embedding_models.get(name)
        if (closed := self._gateway.closed_names().get(name)) is not None:
            exchange.send_value(_closed_body(name, *closed, states))
            return
        if embedding_model is not None:
            exchange.send_value(_model_body(name, embedding_model, states))
            return
        name, served = self._gateway.find(name)
        exchange.send_value(_model_body(name, served, states, tool_format=served.tool_format))


def _closed_body(
    name: str, root: str, parent: str, states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the model object of a model or an adapter that is not open: its limits are unknown."""
    body: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "dynamo"}
    body["root"] = root
    return body | ({"parent": parent} if parent else {}) | dict(states.get(parent or root, {}))


def _model_body(
    name: str,
    served: ServedModel | ServedEmbeddingModel,
    states: Mapping[str, Mapping[str, Any]],
    tool_format: str = "",
) -> dict[str, Any]:
    """Return OpenAI's model object, plus vLLM's `root`, `parent` and `max_model_len`, llama.cpp's
    `status`, and our `tool_format` and `workers`."""
    parent = served.parent if isinstance(served, ServedModel) else ""
    root = served.root if isinstance(served, ServedModel) and parent else served.names[0]
    body = {"id": name, "created": served.created, "owned_by": served.owned_by, "root": root}
    body["max_model_len"] = served.context_tokens
    more = {"tool_format": tool_format, "parent": parent}
    optional = {key: value for key, value in more.items() if value}
    return {**body, **optional, **states.get(parent or served.names[0], {}), "object": "model"}
