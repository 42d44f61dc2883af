"""What the frontend counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynamo.telemetry.metrics import Counter, Histogram, Registry

TTFT_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)
ITL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
DURATION_BUCKETS_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
TOKEN_BUCKETS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class ModelMetrics:
    """One model's children of the labelled metrics."""

    __slots__ = (
        "cached_tokens",
        "duration",
        "input_length",
        "inter_token_latency",
        "output_length",
        "time_to_first_token",
    )

    def __init__(self, families: FrontendMetrics, model: str) -> None:
        self.time_to_first_token: Histogram = families.time_to_first_token.labels(model)
        self.inter_token_latency: Histogram = families.inter_token_latency.labels(model)
        self.duration: Histogram = families.duration.labels(model)
        self.input_length: Histogram = families.input_length.labels(model)
        self.output_length: Histogram = families.output_length.labels(model)
        self.cached_tokens: Counter = families.cached_tokens.labels(model)


class FrontendMetrics:
    """Declared once a process. Models are labels only while they are served: a client cannot
    make new ones."""

    def __init__(self, registry: Registry) -> None:
        by_model = ("model",)
        self.requests = registry.counter(
            "dynamo_frontend_requests_total",
            "Generation requests answered, by route and HTTP status (499: the client left); "
            "without a model where none was found",
            ("model", "endpoint", "status"),
        )
        self.time_to_first_token = registry.histogram(
            "dynamo_frontend_time_to_first_token_seconds",
            "Request read to first text",
            TTFT_BUCKETS_S,
            by_model,
        )
        self.inter_token_latency = registry.histogram(
            "dynamo_frontend_inter_token_latency_seconds",
            "Between texts of one choice",
            ITL_BUCKETS_S,
            by_model,
        )
        self.duration = registry.histogram(
            "dynamo_frontend_request_duration_seconds",
            "Request read to answer complete",
            DURATION_BUCKETS_S,
            by_model,
        )
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
            callback=lambda: self._sums_by_model(lambda one: one.input_length),
        )
        registry.counter(
            "dynamo_frontend_output_tokens_total",
            "Generated tokens",
            by_model,
            callback=lambda: self._sums_by_model(lambda one: one.output_length),
        )
        self.cached_tokens = registry.counter(
            "dynamo_frontend_cached_tokens_total", "Prompt tokens found in a KV cache", by_model
        )
        self._by_model: dict[str, ModelMetrics] = {}

    def _sums_by_model(
        self, of: Callable[[ModelMetrics], Histogram]
    ) -> Mapping[tuple[str, ...], float]:
        return {(name,): of(one).sum for name, one in self._by_model.items()}

    def for_model(self, name: str) -> ModelMetrics:
        """The children of a served model."""
        found = self._by_model.get(name)
        if found is None:
            found = self._by_model[name] = ModelMetrics(self, name)
        return found
