"""The metrics of a frontend's HTTP API, and the times of a request's tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from operator import sub

from dynamo.core.settings.schema_monitoring import CustomMetricSettings
from dynamo.telemetry.metrics import Counter, Histogram, MetricFamily, Registry

DURATION_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
TTFT_BUCKETS_S = (0.001, 0.0025, *DURATION_BUCKETS_S[:-2])
ITL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
STAGE_BUCKETS_S = (0.0005, 0.001, 0.0025, *DURATION_BUCKETS_S[:-3], 300)
TOKEN_BUCKETS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

KNOWN_STATUSES = ("200", "400", "429", "499", "500", "502", "503", "504")


class ModelMetrics:
    """The metrics of one model, with the label filled in."""

    def __init__(self, families: FrontendMetrics, model: str) -> None:
        self.time_to_first_token: Histogram = families.time_to_first_token.labels(model)
        self.inter_token_latency: Histogram = families.inter_token_latency.labels(model)
        self.duration: Histogram = families.duration.labels(model)
        self.input_length: Histogram = families.input_length.labels(model)
        self.output_length: Histogram = families.output_length.labels(model)
        self.cached_tokens: Counter = families.cached_tokens.labels(model)
        self.longest_gap: Histogram = families.longest_gap.labels(model)
        self.recomputed_tokens: Counter = families.recomputed_tokens.labels(model)
        self.stages: Mapping[str, Histogram] = {
            stage: families.stages.labels(model, stage) for stage in families.stage_names
        }


class FrontendMetrics:
    """The metrics of all models of one process.

    Only models that are served become labels, so that clients cannot create time series. The
    promised times in seconds are bounds of the histograms. Stories have the stages `stage_names`;
    without them there are no metrics of stages.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        ttft_promise_s: float = 5,
        gap_promise_s: float = 2,
        stage_names: Sequence[str] = (),
        custom: Sequence[CustomMetricSettings] = (),
    ) -> None:
        by_model = ("model",)
        gap_bounds = sorted({*ITL_BUCKETS_S, gap_promise_s})
        self.stage_names = stage_names
        self.requests = registry.counter(
            "dynamo_frontend_requests_total",
            "Generation requests answered, by route and HTTP status (499: the client left); "
            "the model is empty where none was found",
            ("model", "endpoint", "status"),
        )
        self.time_to_first_token = registry.histogram(
            "dynamo_frontend_time_to_first_token_seconds",
            "From the request being read to the first text",
            _with_custom(custom, "time_to_first_token", (*TTFT_BUCKETS_S, ttft_promise_s)),
            by_model,
        )
        self.inter_token_latency = registry.histogram(
            "dynamo_frontend_inter_token_latency_seconds",
            "Between two texts of one choice",
            _with_custom(custom, "inter_token_latency", gap_bounds),
            by_model,
        )
        self.duration = registry.histogram(
            "dynamo_frontend_request_duration_seconds",
            "From the request being read to the end of the answer",
            _with_custom(custom, "request_duration", DURATION_BUCKETS_S),
            by_model,
        )
        self._declare_tokens(registry)
        self._declare_story_metrics(registry, gap_bounds)
        self._declare_custom(registry, custom)
        self.models: dict[str, ModelMetrics] = {}

    def _declare_tokens(self, registry: Registry) -> None:
        by_model = ("model",)
        self.input_length = registry.histogram(
            "dynamo_frontend_input_sequence_tokens", "Prompt lengths", TOKEN_BUCKETS, by_model
        )
        self.output_length = registry.histogram(
            "dynamo_frontend_output_sequence_tokens", "Answer lengths", TOKEN_BUCKETS, by_model
        )
        registry.counter(
            "dynamo_frontend_input_tokens_total",
            "Prompt tokens",
            by_model,
            callback=lambda: _sums_by_model(self.input_length),
        )
        registry.counter(
            "dynamo_frontend_output_tokens_total",
            "Generated tokens",
            by_model,
            callback=lambda: _sums_by_model(self.output_length),
        )
        self.cached_tokens = registry.counter(
            "dynamo_frontend_cached_tokens_total", "Prompt tokens found in a KV cache", by_model
        )

    def _declare_story_metrics(self, registry: Registry, gap_bounds: Sequence[float]) -> None:
        """Declare what is counted from the stories of requests."""
        self.longest_gap = registry.histogram(
            "dynamo_request_longest_gap_seconds",
            "Longest pause between two texts of an answer",
            [*gap_bounds, *(bound for bound in (10, 30, 60) if bound > gap_bounds[-1])],
            ("model",),
        )
        self.recomputed_tokens = registry.counter(
            "dynamo_request_recomputed_tokens_total",
            "Tokens that workers computed again after a preemption",
            ("model",),
        )
        self.stages = registry.histogram(
            "dynamo_request_stage_seconds",
            "Time of requests by stage, from their stories",
            STAGE_BUCKETS_S,
            ("model", "stage"),
        )

    def _declare_custom(self, registry: Registry, custom: Sequence[CustomMetricSettings]) -> None:
        """Declare custom metrics, which are computed at scrapes. Supervisors know GPUs."""
        sources = {
            "request_duration": self.duration,
            "time_to_first_token": self.time_to_first_token,
            "inter_token_latency": self.inter_token_latency,
        }
        for name, source, buckets in ((each.name, each.shows, each.buckets) for each in custom):
            text = f"{source}, by monitoring.custom_metrics"
            if source == "cache_hit_ratio":
                registry.gauge(name, text, ("model",), callback=self._hit_ratios, merge="max")
            elif source in sources:
                family = sources[source]
                show = partial(_regroup, family, buckets)
                registry.register(name, text, family.new_child, ("model",), "histogram", show)

    def _hit_ratios(self) -> Mapping[tuple[str, ...], float]:
        items = self.input_length.children.items()
        return {
            model: self.cached_tokens.labels(*model).value / h.sum for model, h in items if h.sum
        }

    def for_model(self, name: str) -> ModelMetrics:
        """Return the metrics of a served model."""
        metrics = self.models.get(name)
        if metrics is None:
            metrics = self.models[name] = ModelMetrics(self, name)
        return metrics

    def begin_model(self, name: str, paths: Iterable[str]) -> None:
        """Begin the series of a model at 0, which answers requests to these routes."""
        self.for_model(name)
        for path in sorted(paths):
            for status in KNOWN_STATUSES if path[-1] != "/" else ():
                self.requests.labels(name, path, status)

    def remove_model(self, name: str) -> None:
        """Remove the series of a model that is served no more."""
        self.models.pop(name, None)
        families = (each for each in vars(self).values() if isinstance(each, MetricFamily))
        for family in families:
            for values in [values for values in family.children if values[0] == name]:
                family.remove(*values)


def _with_custom(
    custom: Sequence[CustomMetricSettings], source: str, bounds: Iterable[float]
) -> Sequence[float]:
    """Return bounds with those that custom metrics are made from."""
    wanted = (metric.buckets for metric in custom if metric.shows == source)
    return sorted({*bounds, *chain.from_iterable(wanted)})


def _regroup(
    family: MetricFamily[Histogram], bounds: Sequence[float]
) -> Mapping[tuple[str, ...], Histogram]:
    """Return copies with some of the bounds of a family, by default all."""
    copies = {}
    for model, histogram in family.children.items():
        copies[model] = copy = Histogram(bounds or histogram.bounds)
        copy.sum = histogram.sum
        for bound, count in zip([*histogram.bounds, inf], histogram.counts, strict=True):
            copy.counts[bisect_left(copy.bounds, bound)] += count
    return copies


def _sums_by_model(family: MetricFamily[Histogram]) -> Mapping[tuple[str, ...], float]:
    return {model: histogram.sum for model, histogram in family.children.items()}


MAX_PENDING_TIMESTAMPS = 64
"""Intervals are recorded in batches of this size, to save a call for each token."""


class TokenTiming:
    """Records when the texts of one request are written.

    `timestamps` holds, for each choice, the last recorded time and the times after it. The fast
    path appends to them without `on_text`, from the second text on, and calls `flush` when a list
    has MAX_PENDING_TIMESTAMPS entries. `recorded_texts` counts the texts that are recorded.
    `first_s`: when the first text of all choices was written. `longest_gap_s`: the longest recorded
    interval.
    """

    __slots__ = (
        "_metrics",
        "_started",
        "first_s",
        "longest_gap_s",
        "now",
        "recorded_texts",
        "timestamps",
    )

    def __init__(
        self, metrics: ModelMetrics, now: Callable[[], float], started: float, choices: int
    ) -> None:
        self._metrics = metrics
        self._started = started
        self.now = now
        self.timestamps: list[list[float]] = list(map(list, [()] * choices))
        self.recorded_texts = 0
        self.first_s: float | None = None
        self.longest_gap_s = 0.0

    def on_text(self, choice: int) -> None:
        """Note that text of `choice` is written now."""
        now, timestamps = self.now(), self.timestamps[choice]
        if not timestamps:
            self.recorded_texts += 1
            if self.first_s is None:
                self.first_s = now
                self._metrics.time_to_first_token.observe(now - self._started)
        timestamps.append(now)
        if len(timestamps) >= MAX_PENDING_TIMESTAMPS:
            self.flush()

    def flush(self) -> None:
        """Record all intervals that are not recorded yet."""
        for timestamps in self.timestamps:
            if len(timestamps) > 1:
                intervals = [*map(sub, timestamps[1:], timestamps)]
                self.longest_gap_s = max(self.longest_gap_s, *intervals)
                self._metrics.inter_token_latency.observe_all(intervals)
                self.recorded_texts += len(timestamps) - 1
                del timestamps[:-1]
