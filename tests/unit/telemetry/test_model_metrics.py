"""Metrics with the label `model`, declared by parts that know their own model only."""

from __future__ import annotations

from dynamo.telemetry import Registry
from dynamo.telemetry.metrics import Counter
from dynamo.telemetry.model_metrics import ModelRegistry


def samples(registry: Registry) -> list[str]:
    return [line for line in registry.render().splitlines() if not line.startswith("#")]


def declare(registry: Registry, waiting: float) -> Counter:
    registry.gauge("waiting", "Requests", callback=lambda: waiting)
    registry.counter("rejected", "Requests", ("reason",)).labels("full").inc(waiting)
    registry.histogram("wait", "Time", [1.0]).observe(waiting)
    return registry.counter("routed", "Requests")


def test_each_model_has_series_of_its_own() -> None:
    registry = Registry()
    declare(ModelRegistry(registry, "a"), 1).inc()
    declare(ModelRegistry(registry, "b"), 2)

    assert [line for line in samples(registry) if not line.startswith("wait_")] == [
        'waiting{model="a"} 1',
        'waiting{model="b"} 2',
        'rejected{model="a",reason="full"} 1',
        'rejected{model="b",reason="full"} 2',
        'routed{model="a"} 1',
        'routed{model="b"} 0',
    ]
    assert 'wait_bucket{model="b",le="1.0"} 0' in samples(registry)


def test_a_metric_that_is_declared_again_continues() -> None:
    registry = Registry()
    model = ModelRegistry(registry, "a")
    declare(model, 1).inc()
    declare(model, 5).inc()

    assert 'routed{model="a"} 2' in samples(registry)
    assert 'waiting{model="a"} 5' in samples(registry)


def test_the_series_of_a_removed_model_go() -> None:
    registry = Registry()
    first, second = ModelRegistry(registry, "a"), ModelRegistry(registry, "b")
    declare(first, 1)
    declare(second, 2)
    first.close()

    assert not [line for line in samples(registry) if 'model="a"' in line]
    assert 'waiting{model="b"} 2' in samples(registry)
    second.close()
    assert samples(registry) == []
