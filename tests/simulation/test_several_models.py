"""Several models in one deployment are served as in one deployment each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.simulation.model_trial import TrialShape, run_trial


@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [
        (TrialShape(frontends=2), 0.001),
        (TrialShape(frontends=2, shared_index=True), 0.001),
        (TrialShape(frontends=2, routers=2), 0.03),
        (TrialShape(roles=True, tiers=True, seconds=4.0), 0.01),
    ],
    ids=["frontends", "indexer", "routers", "roles and tiers"],
)
def test_models_have_caches_indexes_and_times_of_their_own(
    shape: TrialShape, tolerance: float
) -> None:
    """Hit ratios and times are those of deployments apart, and no index has foreign events. Queries
    of several models may reach a router process in another order, which breaks ties otherwise."""
    together, apart = (run_trial(shape, together=both) for both in (True, False))
    for model, alone in apart.models.items():
        beside = together.models[model]
        assert 0.3 < alone.hit_ratio == pytest.approx(beside.hit_ratio, rel=tolerance)
        assert beside.ttft_ms.mean == pytest.approx(alone.ttft_ms.mean, rel=tolerance)
    assert together.events <= 1.1 * apart.events
    assert together.event_bytes <= 1.1 * apart.event_bytes
    assert together.index_bytes <= 1.1 * apart.index_bytes


def test_a_flood_of_one_model_whose_workers_die_costs_the_others_nothing() -> None:
    """A model gets five times what it computes, in long prompts, and all its workers die twice."""
    quiet = TrialShape(frontends=2)
    flooded = replace(quiet, flood=5.0, flood_tokens=8_000, kill_every_s=3.0)
    alone, beside = run_trial(quiet, together=False), run_trial(flooded, together=True)
    assert beside.models["a"].ttft_ms.p99 > 10 * alone.models["a"].ttft_ms.p99
    for model in ("b", "ab"):
        assert beside.models[model] == alone.models[model]
        assert beside.models[model].failed == 0
