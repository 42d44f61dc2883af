"""Metrics in OpenMetrics' format are read by the parser of Prometheus' client."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from dynamo.runtime.processes.status import add_process_metrics
from dynamo.telemetry import Registry
from dynamo.telemetry.openmetrics import PROMETHEUS_CONTENT_TYPE, exposition

ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def make_registry() -> Registry:
    registry = Registry()
    add_process_metrics(registry)
    registry.counter("dynamo_a_total", 'things "done"', ("kind",)).labels('x"\n\\').inc(2)
    registry.counter("dynamo_odd", "a counter whose name does not end as those do").inc()
    waits = registry.histogram("dynamo_h_seconds", "time", (0.1, 1, 5), ("model",)).labels("m")
    for value in (0.05, 0.5, 7):
        waits.observe(value)
    waits.set_exemplar(0.5, ({"trace_id": "ab" * 16, "request_id": "r-1"}, 1_700_000_000.25))
    waits.set_exemplar(7.0, ({"request_id": "r-2"}, 1_700_000_001.0))
    registry.add_text(lambda: "# HELP other help\n# TYPE other untyped\nother 3\n")
    return registry


def test_a_scraper_that_asks_for_it_gets_open_metrics() -> None:
    registry = make_registry()
    content_type, body = exposition(registry.render(), ACCEPT, registry.exemplars())
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {each.name: each for each in text_string_to_metric_families(body.decode())}

    assert families["dynamo_a"].type == "counter"
    (sample,) = families["dynamo_a"].samples
    assert (sample.name, sample.value, sample.labels) == (
        "dynamo_a_total", 2, {"kind": 'x"\n\\'},
    )  # fmt: skip
    assert families["dynamo_odd"].type == "unknown"
    assert families["other"].type == "unknown"
    buckets = {
        each.labels["le"]: each
        for each in families["dynamo_h_seconds"].samples
        if each.name.endswith("_bucket")
    }
    assert [each.value for each in buckets.values()] == [1, 2, 2, 3]
    example = buckets["1.0"].exemplar
    assert example is not None
    assert (example.value, example.labels["request_id"]) == (0.5, "r-1")
    assert example.labels["trace_id"] == "ab" * 16
    assert buckets["+Inf"].exemplar is not None
    assert buckets["0.1"].exemplar is buckets["5.0"].exemplar is None


def test_others_get_the_text_format() -> None:
    registry = make_registry()
    for accept in (None, "*/*", "text/plain"):
        text = registry.render()
        assert exposition(text, accept, registry.exemplars()) == (
            PROMETHEUS_CONTENT_TYPE,
            text.encode(),
        )
        assert " # {" not in text
