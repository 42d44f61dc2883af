"""A planner by the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamo.core.plugins import PLANNER_POLICIES, PLANNER_PREDICTORS
from dynamo.core.settings import Settings
from dynamo.operations.planner.planner import ScalePlanner
from dynamo.operations.planner.policies.policy import PolicyOptions, ScalePolicy
from dynamo.operations.planner.rails import Rails
from dynamo.operations.planner.values import Promise


def make_planner(settings: Settings, source: str = "", **tested: Any) -> ScalePlanner:
    """Return the planner of the settings. `tested`: results of a backtest, as `make_policy` has."""
    rails = Rails(settings.planner)
    return ScalePlanner(make_policy(settings, **tested), rails, promise_of(settings), source)


def make_policy(
    settings: Settings, *, eta: float = 0.0, peak: int = 0, eta_missing: str = ""
) -> ScalePolicy:
    """Return the policy of the settings, with what `PolicyOptions` has from a backtest."""
    options = settings.planner
    policy: ScalePolicy = PLANNER_POLICIES.load(options.policy)(
        PolicyOptions(
            PLANNER_PREDICTORS.load(options.predictor),
            _parse_sizes(options.sizes),
            eta,
            eta_missing,
            peak,
        )
    )
    return policy


def promise_of(settings: Settings) -> Promise:
    """Return the promise of the settings: that of the planner, else that of the router."""
    router, options = settings.router, settings.planner
    return Promise(
        options.ttft or router.ttft_slo or math.inf,
        options.itl or router.disaggregation.itl_slo or math.inf,
    )


def _parse_sizes(sizes: tuple[str, ...]) -> Mapping[str, int]:
    pairs = (size.rpartition("=") for size in sizes)
    return {kind: int(count) for kind, _, count in pairs}
