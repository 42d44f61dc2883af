"""The process of the planner."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import DynamoError, ModelNotReady
from dynamo.core.plugins import PLANNER_CONNECTORS
from dynamo.core.settings import Settings
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.decisions import PLANNER_FOLDER, PlannerLog, read_decisions
from dynamo.operations.planner.options import make_planner, make_policy, promise_of
from dynamo.operations.planner.planner import MAX_SAMPLES, describe, plan_once
from dynamo.operations.planner.values import ScaleDecision
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.tuner.rounds import run_round
from dynamo.operations.tuner.search import SettingSearch
from dynamo.operations.tuner.trials import make_stages, tuned_ranges
from dynamo.operations.tuner.tuner import AutoTuner
from dynamo.operations.tuner.verdict import TrialRules, TrialVerdict
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.planning.backtests import (
    WorkerFacts,
    recorded_requests,
    replay_workers,
    run_backtest,
    start_thread,
)
from dynamo.services.planning.figures import DeploymentFigures
from dynamo.services.planning.record import RECORD_FOLDER


class DeploymentTuner:
    """Tunes the deployment of a runtime now and then, by its record and by what is known of its
    workers."""

    def __init__(self, runtime: DistributedRuntime, figures: DeploymentFigures) -> None:
        self._settings = settings = runtime.settings
        self._clock, self._figures = runtime.clock, figures
        self._folder = deployment_of(settings).folder
        self.workers = 0
        """The workers that serve, as the planner sees them."""
        self.tuner = AutoTuner(
            settings.tuner,
            self._make_search,
            self._run_round,
            runtime.clock,
            lambda work: asyncio.wrap_future(start_thread(work)),
        )

    def _make_search(self) -> SettingSearch:
        facts = self._figures.worker_facts(0.0)
        if facts is None or not self.workers:
            raise ModelNotReady("the speed of the workers is not known yet")
        requests = recorded_requests(self._folder / RECORD_FOLDER)
        return search_record(self._settings, requests, facts, self.workers)

    async def _run_round(self, kind: str, values: Mapping[str, Any]) -> TrialVerdict:
        tuner = self._settings.tuner
        rules = TrialRules(
            promise_of(self._settings),
            tuner.tuning_observation_period,
            tuner.min_improvement_threshold,
        )
        record = self._folder / RECORD_FOLDER
        return await run_round(self._folder, record, kind, values, rules, self._clock)


def search_record(
    settings: Settings, requests: list[Any], facts: WorkerFacts, workers: int
) -> SettingSearch:
    """Return a search with so many workers of these facts, which begins with their sizes."""
    limits = facts.limits

    def plan_with(values: Mapping[str, Any]) -> ReplayPlan:
        tried = replace(
            limits,
            max_seqs=values["engine.max_num_seqs"],
            step_tokens=values["engine.max_num_batched_tokens"],
        )
        routing = replace(
            settings.router,
            policy=values.get("router.policy", settings.router.policy),
            max_queue_wait=math.inf,
            ttft_slo=0.0,
        )
        return ReplayPlan("record", replay_workers(tried, facts.timing, workers), routing)

    start = {
        "engine.max_num_seqs": limits.max_seqs,
        "engine.max_num_batched_tokens": limits.step_tokens,
        "router.policy": settings.router.policy,
    }
    stages = make_stages(requests, plan_with, promise_of(settings))
    return SettingSearch(tuned_ranges(settings), start, stages, settings.tuner.min_safety_score)


log = logging.getLogger(__name__)

RETRY_BACKTEST_S, BACKTEST_INTERVAL_S = 60.0, 6 * 3600.0
PLANNERS_PREFIX = "/_planners/"
"""The prefix of the keys of planners in discovery. The one that was there first acts."""


class PlannerService:
    """Decides at the interval of the policy, and gives orders while no older planner does."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start planning. Raises `ConfigError` for an unknown policy, predictor or connector."""
        self._runtime = runtime
        settings = runtime.settings
        folder = deployment_of(settings).folder / PLANNER_FOLDER
        self._log = PlannerLog(folder)
        self._connector: Connector = PLANNER_CONNECTORS.load(settings.planner.connector)(runtime)
        past = await runtime.clock.offload(read_decisions, folder, MAX_SAMPLES)
        self._planner = make_planner(settings, runtime.supervisor)
        self._planner.resume(past)
        self._resume_backtest(past)
        self._figures, self._start_s = DeploymentFigures(runtime), 0.0
        await self._figures.open()
        self._declare_metrics()
        runtime.on_settings_change(self._on_settings_change)
        runtime.add_shutdown_hook(lambda _: self._connector.close())
        self._tuner = DeploymentTuner(runtime, self._figures)
        self._key = f"{PLANNERS_PREFIX}{settings.runtime.namespace}/{runtime.instance_id}"
        since = f"{runtime.clock.wall():017.6f}"
        await runtime.discovery.put(self._key, since.encode())
        runtime.tasks.start(self._run(), "planner")
        if settings.planner.policy == "flow":
            runtime.tasks.start(self._run_backtests(), "backtests")
        if settings.tuner.auto_tune_interval:
            runtime.tasks.start(self._tuner.tuner.run(), "tuner")

    def _on_settings_change(self, settings: Settings) -> None:
        self._planner.rails.settings = settings.planner

    async def _run(self) -> None:
        clock, was_first = self._runtime.clock, True
        while True:
            due_s = clock.now() + self._planner.policy.interval_s
            is_first = await self._is_first()
            if not is_first:
                self._tuner.workers = 0  # the other one tunes
            if is_first:
                await self._decide()
            elif was_first:
                log.info("another planner acts; this one waits")
            was_first = is_first
            await clock.sleep_until(due_s)

    def _resume_backtest(self, past: Sequence[ScaleDecision]) -> None:
        """Go on with the headroom of the last decision until there is a new backtest."""
        samples = [sample for each in past for sample in each.proposed.values()]
        facts = samples[-1].facts if samples else {}
        if "eta" in facts:
            self._set_policy(eta=facts["eta"], peak=int(facts["peak"]))

    def _set_policy(self, **tested: Any) -> None:
        self._planner.policy = make_policy(self._runtime.settings, **tested)

    async def _run_backtests(self) -> None:
        """Backtest the policy as soon as the record is long enough, and then now and then."""
        clock, settings = self._runtime.clock, self._runtime.settings
        record = deployment_of(settings).folder / RECORD_FOLDER
        while True:
            await clock.sleep(RETRY_BACKTEST_S)
            facts = self._figures.worker_facts(self._start_s)
            if facts is None:
                continue
            try:
                work = partial(run_backtest, settings, record, facts)
                tested = await asyncio.wrap_future(start_thread(work))
            except (DynamoError, OSError) as error:
                if not self._planner.policy.options.eta:
                    self._set_policy(eta_missing=str(error))
                continue
            self._set_policy(eta=tested.eta, peak=tested.peak)
            log.info("backtest", extra={"fields": msgspec.to_builtins(tested)})
            await clock.sleep(BACKTEST_INTERVAL_S)

    async def _is_first(self) -> bool:
        """Return whether no other planner of the namespace was there before."""
        try:
            planners = await self._runtime.discovery.get(self._key.rpartition("/")[0] + "/")
        except DynamoError as error:
            log.warning("planners are unknown", extra={"fields": {"error": error.message}})
            return False
        return min(planners, key=lambda key: (planners[key], key), default="") == self._key

    async def _decide(self) -> None:
        now = self._runtime.clock.wall()
        figures = self._figures.measure
        decision = await plan_once(self._planner, self._connector, figures, self._keep, now)
        self._tuner.workers = sum(kind.ready for kind in decision.kinds.values())
        self._start_s = max((kind.start_s for kind in decision.kinds.values()), default=0.0)

    def _keep(self, decision: ScaleDecision) -> None:
        """Record a decision before its orders are given."""
        try:
            self._log.write(decision)
        except OSError as error:
            log.warning("a decision is not recorded", extra={"fields": {"error": str(error)}})
        if decision.orders or decision.outcome:
            for sentence in describe(decision, lambda _: ""):
                log.info(sentence.strip())
        self._count(decision)

    def _declare_metrics(self) -> None:
        metrics = self._runtime.metrics
        self._desired = metrics.gauge(
            "dynamo_planner_desired_workers",
            "Workers that the planner wants, for an autoscaler",
            ("kind",),
        )
        self._present = metrics.gauge(
            "dynamo_planner_workers", "Workers that the planner sees", ("kind", "state")
        )
        self._work = metrics.gauge(
            "dynamo_planner_work_workers",
            "Workers that are busy all the time with what the last decision found",
            ("model", "fact"),
        )
        self._decisions = metrics.counter("dynamo_planner_decisions_total", "Decisions made")
        self._orders = metrics.counter("dynamo_planner_orders_total", "Orders given", ("kind",))
        self._bound = metrics.counter(
            "dynamo_planner_bound_total", "Decisions in which a rail bound the size", ("kind",)
        )

    def _count(self, decision: ScaleDecision) -> None:
        self._decisions.inc()
        desired = {kind: state.wanted for kind, state in decision.kinds.items()}
        for order in decision.orders:
            self._orders.labels(order.kind).inc()
            if order.takes_from:
                desired[order.takes_from] -= order.count - desired[order.kind]
            desired[order.kind] = order.count
        for kind, state in decision.kinds.items():
            for counter in (self._orders, self._bound):
                counter.labels(kind)  # its series begins at 0
            self._desired.labels(kind).set(desired[kind])
            for name in ("ready", "starting", "draining"):
                self._present.labels(kind, name).set(getattr(state, name))
        for kind in decision.bound:
            self._bound.labels(kind).inc()
        for model, sample in decision.proposed.items():
            for fact, value in sample.facts.items():
                if fact.startswith(("work", "forecast")):
                    self._work.labels(model, fact).set(value)
