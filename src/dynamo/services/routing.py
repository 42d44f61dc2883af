"""The routing state of one process: its models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import SupervisorView
from dynamo.scheduling.admission.worker_starts import LoadPrediction
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.index.cache_view_metrics import declare_cache_view_metrics
from dynamo.scheduling.router.decision_metrics import DecisionMetrics
from dynamo.scheduling.router.factory import KV
from dynamo.scheduling.router.harm_steering import declare_harm_metrics
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.router.selectors import make_selector
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.services.desired_models import DesiredModels
from dynamo.telemetry.model_metrics import ModelRegistry
from dynamo.telemetry.story import ProcessSample

COUNTED_MODES = (KV, ADAPTIVE)
"""Modes whose decisions are counted."""


class ModelRouting(NamedTuple):
    """The parts of one model's pipeline that are observed. `cache_view` is None outside mode kv."""

    client: Client
    policy: Policy
    loads: LoadView
    cache_view: CacheView | None


class ProcessRouting:
    """All models of this process as the router sees them.
    `predict_load(model)` returns when a model that is on demand will serve, None for others."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        """Raises `ConfigError` for an unknown or unusable `router.selector`."""
        settings = runtime.settings.router
        self._runtime = runtime
        self.predict_load: Callable[[str], LoadPrediction | None] = lambda _: None
        self._models: dict[str, ModelRouting] = {}
        self._metrics: dict[str, ModelRegistry] = {}
        self._decision_metrics: dict[str, DecisionMetrics] = {}
        self.counts_decisions = settings.mode in COUNTED_MODES
        self._supervisors: SupervisorView | None = None
        if settings.mode == KV:
            make_selector(settings.selector, settings.temperature, runtime.rng)

    def metrics_of(self, model: str) -> ModelRegistry:
        """Return the registry of a model's metrics, which `remove_model` closes."""
        if model not in self._metrics:
            self._metrics[model] = ModelRegistry(self._runtime.metrics, model)
        return self._metrics[model]

    def decision_metrics_of(self, model: str) -> DecisionMetrics:
        """Return the observer that counts a model's routing decisions."""
        if model not in self._decision_metrics:

            def waiting() -> int:
                return self._models[model].policy.waiting

            metrics = DecisionMetrics(self.metrics_of(model), waiting=waiting)
            self._decision_metrics[model] = metrics
        return self._decision_metrics[model]

    def add_model(self, name: str, model: ModelRouting) -> None:
        """Observe a model, instead of an earlier one of that name."""
        self._models[name] = model
        metrics = self.metrics_of(name)
        if (view := model.cache_view) is not None:
            declare_cache_view_metrics(metrics, lambda: (view,))
        declare_harm_metrics(metrics, lambda: model.policy.harm_steering)

    def remove_model(self, name: str) -> None:
        """Forget a model and its metrics."""
        self._models.pop(name, None)
        self._decision_metrics.pop(name, None)
        if (metrics := self._metrics.pop(name, None)) is not None:
            metrics.close()

    def desired_models(self) -> DesiredModels:
        """Return the models that supervisors are to serve in this namespace."""
        namespace = self._runtime.settings.runtime.namespace
        own = self._runtime.supervisor.partition("/")[0]
        return DesiredModels(self.follow_supervisors(), namespace, own)

    def follow_supervisors(self) -> SupervisorView:
        """Return the view of all supervisors that the models of this process share."""
        if self._supervisors is None:
            runtime = self._runtime
            self._supervisors = SupervisorView(runtime.discovery, runtime.clock)
            runtime.tasks.start(self._supervisors.follow(), "watch supervisors")
        return self._supervisors

    def view_modes(self) -> Mapping[str, Mapping[str, str]]:
        """Return by model how each worker's cache is known."""
        modes = {name: model.policy.cache_view_modes() for name, model in self._models.items()}
        return {name: mode for name, mode in modes.items() if mode}

    def router_states(self) -> Mapping[str, Mapping[str, str]]:
        """Return by model the state of each router process; empty where this process chooses."""
        states = {name: model.policy.router_states() for name, model in self._models.items()}
        return {name: state for name, state in states.items() if state}

    def count_waiting(self) -> int:
        """Return how many requests the policies of all models hold for a better moment."""
        waiting = 0
        for model in self._models.values():  # this runs once a request
            waiting += model.policy.waiting
        return waiting

    def sample(self) -> ProcessSample:
        """Return what this process knows of its workers now."""
        sent: Counter[str] = Counter()
        views: dict[str, str] = {}
        for model in self._models.values():
            client = model.client
            sent.update({name: client.in_flight(name) for name in client.instances})
            views.update(model.policy.cache_view_modes())
        return ProcessSample(self.count_waiting(), dict(sent), views)
