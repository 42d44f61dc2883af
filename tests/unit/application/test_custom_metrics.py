"""`monitoring.custom_metrics` at frontends."""

from __future__ import annotations

from random import Random

from dynamo.application.frontend_metrics import DURATION_BUCKETS_S, FrontendMetrics
from dynamo.core.settings.schema_monitoring import CustomMetricSettings
from dynamo.telemetry import Registry

NAMES = ("request_latency_p99", "cache_hit_ratio", "gpu_utilization")


def samples(registry: Registry, name: str) -> dict[str, float]:
    """Return the samples of a metric by the rest of their names."""
    lines = [line for line in registry.render().splitlines() if line.startswith(name)]
    parts = [line.removeprefix(name).rpartition(" ") for line in lines]
    return {rest: float(value) for rest, _, value in parts}


def test_a_custom_histogram_counts_as_if_it_had_observed_all() -> None:
    random, registry, reference = Random(5), Registry(), Registry()
    buckets = {
        "request_duration": (0.1, 0.33, 1.0, 7.5),
        "time_to_first_token": (0.07,),
        "inter_token_latency": (0.0001, 1.5),
    }
    custom = [CustomMetricSettings(f"my_{s}", None, b, s) for s, b in buckets.items()]
    metrics = FrontendMetrics(registry, custom=custom)
    for model in ("a", "b"):
        of_model = metrics.for_model(model)
        histograms = (
            of_model.duration,
            of_model.time_to_first_token,
            of_model.inter_token_latency,
        )
        for source, histogram in zip(buckets, histograms, strict=True):
            expected = reference.histogram(f"my_{source}", "", buckets[source], ("model",))
            values = [*buckets[source], *(random.expovariate(1) for _ in range(300))]
            for value in values:
                histogram.observe(value)
                expected.labels(model).observe(value)
    assert len(samples(reference, "my_")) == 32
    assert samples(registry, "my_") == samples(reference, "my_")

    metrics.remove_model("a")
    assert not [name for name in samples(registry, "my_") if 'model="a"' in name]


def test_a_custom_histogram_has_the_usual_buckets_by_default() -> None:
    registry = Registry()
    metrics = FrontendMetrics(registry, custom=[CustomMetricSettings(NAMES[0])])
    metrics.for_model("m").duration.observe(3)
    counts = samples(registry, f"{NAMES[0]}_bucket")
    assert len(counts) == len(DURATION_BUCKETS_S) + 1
    assert counts['{model="m",le="2.5"}'] == 0
    assert counts['{model="m",le="5.0"}'] == 1


def test_the_hit_ratio_is_the_cached_share_of_prompt_tokens() -> None:
    registry = Registry()
    metrics = FrontendMetrics(registry, custom=[CustomMetricSettings("cache_hit_ratio")])
    metrics.begin_model("idle", ())
    used = metrics.for_model("m")
    used.input_length.observe(300)
    used.cached_tokens.inc(75)
    assert samples(registry, "cache_hit_ratio") == {'{model="m"}': 0.25}


def test_there_are_no_custom_metrics_by_default() -> None:
    registry = Registry()
    FrontendMetrics(registry).begin_model("m", ())
    assert {line.split()[2][:7] for line in registry.render().splitlines() if "# TYPE" in line} == {
        "dynamo_"
    }
