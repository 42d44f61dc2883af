"""The routing state of one process: its models, and a record of routing decisions."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dynamo.core.kv_events import split_worker_name
from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import SupervisorView
from dynamo.scheduling.admission.worker_starts import LoadPrediction
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE, CacheView
from dynamo.scheduling.index.cache_view_metrics import declare_cache_view_metrics
from dynamo.scheduling.router.explain.recorder import RoutingRecorder
from dynamo.scheduling.router.explain.timeline import SAMPLE_INTERVAL_S, RoutingTimeline
from dynamo.scheduling.router.factory import KV
from dynamo.scheduling.router.harm_steering import declare_harm_metrics
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.router.selectors import make_selector
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.services.desired_models import DesiredModels
from dynamo.telemetry.model_metrics import ModelRegistry

EXPLAINABLE_MODES = (KV, ADAPTIVE)
"""Modes whose decisions can be explained."""
TIMER_EARLY_S = 0.01
VIEW_MODES_BEST_FIRST = ("exact", "stale", "approximate", NO_PREFIX_CACHE)


def worst_view_by_instance(views: Mapping[str, str]) -> dict[str, str]:
    """Return the least precise cache view among the data-parallel ranks of each instance."""
    worst: dict[str, str] = {}
    for name, view in views.items():
        instance, _ = split_worker_name(name)
        worst[instance] = max(worst.get(instance, view), view, key=VIEW_MODES_BEST_FIRST.index)
    return worst


class ModelRouting(NamedTuple):
    """The parts of one model's pipeline that are observed. `cache_view` is None outside mode kv."""

    client: Client
    policy: Policy
    loads: LoadView
    cache_view: CacheView | None


class ProcessRouting:
    """All models of this process as the router sees them, with recent decisions and samples.
    `predict_load(model)` returns when a model that is on demand will serve, None for others."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        """Raises `ConfigError` for an unknown or unusable `router.selector`."""
        settings = runtime.settings.router
        self._runtime = runtime
        self.predict_load: Callable[[str], LoadPrediction | None] = lambda _: None
        self._models: dict[str, ModelRouting] = {}
        self._metrics: dict[str, ModelRegistry] = {}
        self._recorders: dict[str, RoutingRecorder] = {}
        self.observer = RoutingRecorder(runtime.clock, None, runtime.name)
        runtime.metrics.gauge(
            "dynamo_router_alert_ratio",
            "Value of a broken routing rule over its threshold; 0 while the rule holds",
            ("alert",),
            callback=self.observer.collector.alert_ratios,
            merge="max",
        )
        self.timeline = RoutingTimeline(self.observer)
        self.records_decisions = settings.mode in EXPLAINABLE_MODES
        self._sampling_started = False
        self._supervisors: SupervisorView | None = None
        if settings.mode == KV:
            make_selector(settings.selector, settings.temperature, runtime.rng)

    def metrics_of(self, model: str) -> ModelRegistry:
        """Return the registry of a model's metrics, which `remove_model` closes."""
        if model not in self._metrics:
            self._metrics[model] = ModelRegistry(self._runtime.metrics, model)
        return self._metrics[model]

    def recorder_of(self, model: str) -> RoutingRecorder:
        """Return the observer of a model's routing decisions."""
        if model not in self._recorders:
            clock, metrics = self._runtime.clock, self.metrics_of(model)

            def waiting() -> int:
                return self._models[model].policy.waiting

            self._recorders[model] = RoutingRecorder(
                clock, metrics, waiting=waiting, process=self.observer
            )
        return self._recorders[model]

    def add_model(self, name: str, model: ModelRouting) -> None:
        """Observe a model, instead of an earlier one of that name."""
        self._models[name] = model
        metrics = self.metrics_of(name)
        if (view := model.cache_view) is not None:
            declare_cache_view_metrics(metrics, lambda: (view,))
        declare_harm_metrics(metrics, lambda: model.policy.harm_steering)
        if not self._sampling_started:
            self._sampling_started = True
            self._runtime.tasks.start(self._sample_every_second(), "routing samples")

    def remove_model(self, name: str) -> None:
        """Forget a model and its metrics."""
        self._models.pop(name, None)
        self._recorders.pop(name, None)
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

    async def _sample_every_second(self) -> None:
        """Sample on every whole second, so that samples of several processes can be merged.

        A timer may fire early by up to `TIMER_EARLY_S`, and the wall clock may be set back.
        """
        clock = self._runtime.clock
        while True:
            last_s = (clock.wall() + TIMER_EARLY_S) // SAMPLE_INTERVAL_S * SAMPLE_INTERVAL_S
            next_s = last_s + SAMPLE_INTERVAL_S
            await clock.sleep(next_s - clock.wall())
            self._sample(next_s)

    def _sample(self, at: float) -> None:
        """Add a sample of all models' workers at the Unix time `at`."""
        models = self._models.values()
        workers = [worker for model in models for worker in model.client.instances]
        self.observer.collector.workers = len(workers)
        active: Counter[str] = Counter()
        for model in models:
            active.update({name: model.client.in_flight(name) for name in model.client.instances})
        views = (worst_view_by_instance(model.policy.cache_view_modes()) for model in models)
        self.timeline.record(
            at,
            workers,
            ChainMap(*(model.loads.loads for model in models)),
            active,
            views=ChainMap(*views),
            waiting=self.count_waiting(),
        )
