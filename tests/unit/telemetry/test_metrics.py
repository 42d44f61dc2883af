from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dynamo.runtime.processes.status import add_process_metrics
from dynamo.telemetry import Registry, render_merged
from dynamo.telemetry.metrics import Histogram


def test_counters_gauges_and_their_labels_are_rendered() -> None:
    registry = Registry()
    registry.counter("dynamo_a_total", "things done").inc(2)
    waiting = registry.gauge("dynamo_b", "waiting", ("kind",))
    waiting.labels('x"\n').set(1.5)
    waiting.labels("gone").inc()
    waiting.remove("gone")

    assert registry.render() == (
        "# HELP dynamo_a_total things done\n"
        "# TYPE dynamo_a_total counter\n"
        "dynamo_a_total 2\n"
        "# HELP dynamo_b waiting\n"
        "# TYPE dynamo_b gauge\n"
        'dynamo_b{kind="x\\"\\n"} 1.5\n'
    )


def test_a_histogram_counts_values_up_to_its_bounds() -> None:
    registry = Registry()
    histogram = registry.histogram("dynamo_h_seconds", "time", (0.1, 1))
    for value in (0.1, 0.5, 7, 0.05, 0.05):
        histogram.observe(value)

    assert registry.render().splitlines()[2:] == [
        'dynamo_h_seconds_bucket{le="0.1"} 3',
        'dynamo_h_seconds_bucket{le="1.0"} 4',
        'dynamo_h_seconds_bucket{le="+Inf"} 5',
        "dynamo_h_seconds_sum 7.699999999999999",
        "dynamo_h_seconds_count 5",
    ]


def test_observe_all_equals_single_observations() -> None:
    batched, single = Histogram([1.0, 2.0, 4.0]), Histogram([1.0, 2.0, 4.0])
    for values in ([], [0.5], [4.0, 1.0, 2.0, 2.5], [9.0, 4.5, 1.5, 1.0, 1.0]):
        batched.observe_all(values)
        for value in values:
            single.observe(value)
    assert batched.counts == single.counts == [4, 2, 2, 2]
    assert batched.sum == single.sum


def test_callbacks_are_called_at_scrape() -> None:
    registry = Registry()
    registry.gauge("dynamo_one", "one value", callback=lambda: 3)
    registry.gauge("dynamo_many", "by label", ("who",), callback=lambda: {("a",): 1, ("b",): 2})

    text = registry.render()

    assert "dynamo_one 3\n" in text
    assert 'dynamo_many{who="b"} 2\n' in text


def test_a_second_declaration_returns_the_metric_and_another_kind_is_refused() -> None:
    registry = Registry()
    first = registry.counter("dynamo_a_total", "a")

    assert registry.counter("dynamo_a_total", "a") is first
    with pytest.raises(ValueError, match="already a counter"):
        registry.gauge("dynamo_a_total", "a")
    with pytest.raises(ValueError, match="not a valid metric name"):
        registry.gauge("Dynamo-a", "a")
    with pytest.raises(ValueError, match="ascend"):
        registry.histogram("dynamo_h", "h", (2, 1))


def test_metrics_of_several_processes_are_merged() -> None:
    texts = []
    for active in (2, 3):
        registry = Registry()
        registry.gauge("dynamo_active", "requests", ("model",)).labels("a b").set(active)
        registry.gauge("dynamo_known", "workers", merge="max").set(active)
        registry.gauge("dynamo_up_ratio", "up", merge="min").set(active)
        registry.histogram("dynamo_t_seconds", "t", (1,)).observe(active / 3)
        texts.append(registry.render())

    merged = render_merged([*texts, ""]).splitlines()

    assert 'dynamo_active{model="a b"} 5' in merged
    assert "dynamo_known 3" in merged
    assert "dynamo_up_ratio 2" in merged
    assert 'dynamo_t_seconds_bucket{le="1.0"} 2' in merged
    assert "dynamo_t_seconds_count 2" in merged
    assert len([line for line in merged if line.startswith("# TYPE")]) == 4


def test_process_metrics_have_memory_and_open_files() -> None:
    registry = Registry()
    add_process_metrics(registry)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        text = registry.render()
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))

    assert float(values["process_resident_memory_bytes"]) > 1 << 20
    assert float(values["process_open_fds"]) >= 3
    assert int(values["process_max_fds"]) >= int(values["process_open_fds"])
    assert int(values["process_threads"]) >= 2
