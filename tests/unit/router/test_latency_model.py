"""Latency models learn from the measured times of workers."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.router.fake_cluster import ENGINE, FakeCluster, instance

from dynamo.scheduling.workers.latency_model import LatencyRegression, WorkerSlowdown


@pytest.mark.parametrize("scale", [0.05, 1.0, 200.0])
def test_the_regression_fits_noisy_observations(scale: float) -> None:
    rng, regression = Random(3), LatencyRegression(15.0, 0.02, 1_000.0)
    for _ in range(400):
        x = rng.choice([200, 1_000, 5_000])
        true = scale * (10.0 + 0.03 * x)
        regression.observe(1.0, x, true * rng.uniform(0.8, 1.2))
    assert regression.base == pytest.approx(10.0 * scale, rel=0.35)
    assert regression.slope == pytest.approx(0.03 * scale, rel=0.15)


def test_the_first_observation_sets_the_scale() -> None:
    regression = LatencyRegression(15.0, 0.02, 1_000.0)
    regression.observe(1.0, 1_000, 3_500.0)
    assert regression.predict(1.0, 1_000) == pytest.approx(3_500.0, rel=0.05)


def test_an_outlier_is_clipped() -> None:
    regression = LatencyRegression(15.0, 0.02, 1_000.0)
    for _ in range(50):
        regression.observe(1.0, 1_000, 35.0)
    regression.observe(1.0, 1_000, 35_000.0)
    assert regression.predict(1.0, 1_000) < 60


def test_small_observations_bound_large_ones_only_in_proportion() -> None:
    """The slope is not known before a large x was observed, and again when that is long ago."""
    regression = LatencyRegression(15.0, 0.02, 1_000.0)
    assert regression.excess(1.0, 6_000) == 0.0
    for _ in range(50):
        regression.observe(1.0, 64, 10.0 + 0.1 * 64)
    assert regression.excess(1.0, 64) == 0.0
    true = 10.0 + 0.1 * 6_000
    assert regression.predict(1.0, 6_000) < true / 2
    assert regression.predict(1.0, 6_000) + regression.excess(1.0, 6_000) > true
    regression.observe(1.0, 6_000, true)
    assert regression.excess(1.0, 6_000) == 0.0
    for _ in range(400):
        regression.observe(1.0, 64, 10.0 + 0.1 * 64)
    assert regression.predict(1.0, 6_000) + regression.excess(1.0, 6_000) > true


@pytest.mark.parametrize("slope", [0.1, 1.0, 3.0])
def test_the_first_large_observation_is_no_outlier(slope: float) -> None:
    regression = LatencyRegression(15.0, 0.02, 1_000.0)
    for _ in range(50):
        regression.observe(1.0, 64, 10.0 + slope * 64)
    regression.observe(1.0, 6_000, true := 10.0 + slope * 6_000)
    assert regression.predict(1.0, 6_000) == pytest.approx(true, rel=0.1)


def test_the_slowdown_finds_a_slow_worker_but_not_noise() -> None:
    rng, slow, same = Random(5), WorkerSlowdown(), WorkerSlowdown()
    for _ in range(200):
        slow.observe(100.0, 200.0 * rng.uniform(0.9, 1.1))
        same.observe(100.0, 100.0 * rng.uniform(0.7, 1.3))
    assert slow.factor > 1.6
    assert same.factor == pytest.approx(1.0, abs=0.06)


def test_predictions_follow_measured_first_tokens() -> None:
    """A worker with 10 ms a step and 2 ms a token, like a CPU, is predicted within 10 %."""
    cluster, rng = FakeCluster(1), Random(2)
    for _ in range(60):
        tokens = rng.choice([100, 400, 900])
        active = cluster.add_prefill("a", tokens)
        cluster.now += (10 + 2.0 * tokens) * 1e-3
        cluster.first_token(active)
        cluster.end(active)
        cluster.now += 1
    assert cluster.worker_states["a"].predict_prefill_ms(500) == pytest.approx(1_010, rel=0.1)


def test_prompts_of_one_step_are_one_observation() -> None:
    cluster = FakeCluster(1)
    for _ in range(30):
        together = [cluster.add_prefill("a", 500) for _ in range(4)]
        cluster.now += (15 + 0.02 * 2_000) * 1e-3
        for active in together:
            cluster.first_token(active)
            cluster.end(active)
        cluster.now += 1
    assert cluster.worker_states["a"].predict_prefill_ms(2_000) == pytest.approx(55, rel=0.1)


def test_a_new_worker_shares_the_model_of_its_kind() -> None:
    cluster = FakeCluster(2)
    larger = instance("b", engine=ENGINE | {"num_blocks": 9_999})
    cluster.worker_states.update_instances({"a": instance("a")})
    cluster.worker_states.update_instances({"a": instance("a"), "b": larger})
    for _ in range(30):
        active = cluster.add_prefill("a", 1_000)
        cluster.now += 2.0
        cluster.first_token(active)
        cluster.end(active)
    cluster.worker_states.refresh_next(cluster.now)
    assert cluster.worker_states["b"].predict_prefill_ms(1_000) == pytest.approx(2_000, rel=0.2)


def test_prompts_that_share_steps_are_predicted_together() -> None:
    """The prediction for one prompt is much earlier than the sum of separate steps."""
    cluster = FakeCluster(1)
    worker = cluster.worker_states["a"]
    burst = [cluster.add_prefill("a", 100) for _ in range(20)]
    last_s = burst[-1].expected_first_token_s - cluster.now
    assert last_s == pytest.approx(
        (worker.predict_prefill_ms(1_900) + worker.predict_prefill_ms(100)) * 1e-3
    )
    assert last_s < (worker.prefill_free_s - cluster.now) / 4
    alone = cluster.add_prefill("a", 20_000)
    cluster.now = worker.prefill_free_s - 0.01
    after = cluster.add_prefill("a", 100)
    assert (
        alone.expected_first_token_s
        < after.expected_first_token_s
        < cluster.now + 0.01 + worker.predict_prefill_ms(200) * 1e-3
    )
