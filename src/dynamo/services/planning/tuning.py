"""The tuner of a deployment that serves, in the process of its planner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from dynamo.core.errors import ModelNotReady
from dynamo.core.settings import Settings
from dynamo.operations.planner.options import promise_of
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
