"""A worker's metrics under the names of vLLM, by which gateways balance load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from dynamo.core.adapters import adapter_name
from dynamo.core.codec import ReplyEncoder
from dynamo.core.reply import Engine
from dynamo.core.values import EngineInfo, EngineTotals, Finish, Load, Started
from dynamo.telemetry.metrics import Registry

LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
"""vLLM's bounds: a sum by `le` over workers of ours and of vLLM is wrong with other ones."""
MODEL = ("model_name",)


class VllmNames:
    """Adds metrics to those of a worker. Stages are known of requests whose engine tells them; the
    time between tokens is the mean of each request. `now`: the worker's clock, in seconds."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        model: str,
        info: EngineInfo,
        now: Callable[[], float],
    ) -> None:
        self.now = now
        self._registry = aliases = Registry()
        self._label = (model,)
        self._engine, self._counted = engine, EngineTotals()

        def level(name: str, text: str, read: Callable[[Load], float]) -> None:
            read_load = engine.report_load
            aliases.gauge(name, text, MODEL, callback=lambda: {self._label: read(read_load())})

        level("num_requests_running", "Requests in the batch", lambda load: load.running)
        level("num_requests_waiting", "Requests that wait for the batch", lambda load: load.waiting)
        level(
            "kv_cache_usage_perc",
            "Share of KV blocks in use, 0 to 1",
            lambda load: load.active_blocks / load.total_blocks if load.total_blocks else 0.0,
        )
        aliases.gauge(
            "cache_config_info",
            "1, with the size of the KV cache",
            ("block_size", "num_gpu_blocks", *MODEL),
            callback=lambda: {(str(info.block_tokens), str(info.num_blocks), model): 1},
        )
        if engine.adapters is not None:
            labels = ("running_lora_adapters", "waiting_lora_adapters", "max_lora", *MODEL)
            aliases.gauge("lora_requests_info", "Loaded adapters", labels, callback=self._adapters)
        self._declare_totals()
        self._times = {
            name: aliases.histogram(f"{name}_seconds", text, bounds, MODEL).labels(model)
            for name, text, bounds in (
                ("request_queue_time", "Time until a step takes a request up", LATENCY),
                ("request_prefill_time", "Time from there to the first token", LATENCY),
                ("request_decode_time", "Time from the first token to the end", LATENCY),
                ("time_to_first_token", "Time until the first token", FIRST_TOKEN),
                ("inter_token_latency", "Mean time between tokens of a request", BETWEEN_TOKENS),
                ("e2e_request_latency", "Time of a request at the worker", LATENCY),
            )
        }
        registry.add_text(self._render)

    def _declare_totals(self) -> None:
        def total(name: str, text: str, read: Callable[[EngineTotals], float]) -> None:
            self._registry.counter(
                f"{name}_total", text, MODEL, callback=lambda: {self._label: read(self._totals())}
            )

        total("prompt_tokens", "Prompt tokens", lambda totals: totals.prompt_tokens)
        total("generation_tokens", "Generated tokens", lambda totals: totals.generated_tokens)
        total(
            "prefix_cache_queries",
            "Prompt tokens that were looked up",
            lambda totals: totals.prompt_tokens,
        )
        total(
            "prefix_cache_hits", "Prompt tokens from the cache", lambda totals: totals.cached_tokens
        )
        total("num_preemptions", "Preemptions", lambda totals: totals.preemptions)

    def _adapters(self) -> Mapping[tuple[str, ...], float]:
        paths = self._engine.adapters.paths if self._engine.adapters is not None else ()
        loaded = ",".join(adapter_name(adapter) for adapter in paths)
        return {(loaded, "", str(len(paths)), *self._label): 1}

    def _render(self) -> str:
        lines = self._registry.render().splitlines()
        return "\n".join(
            f"{line[:7]}vllm:{line[7:]}" if line[0] == "#" else f"vllm:{line}" for line in lines
        )

    def _totals(self) -> EngineTotals:
        return self._engine.totals() or self._counted

    def on_finish(self, reply: CountedReply, cached_tokens: int, end: Finish) -> None:
        """Count a request that has ended. The totals count for an engine that has none."""
        counted, times = self._counted, end.times
        counted.prompt_tokens += reply.prompt_tokens
        counted.cached_tokens += cached_tokens
        counted.generated_tokens += end.completion_tokens
        ended_s = self.now()
        decode_s = ended_s - reply.begun_s
        self._times["time_to_first_token"].observe(reply.begun_s - reply.received_s)
        self._times["e2e_request_latency"].observe(ended_s - reply.received_s)
        if times is not None and times.prefill_s is not None:
            decode_s = times.decode_s or 0.0
            self._times["request_queue_time"].observe(times.queue_s or 0.0)
            self._times["request_prefill_time"].observe(times.prefill_s + (times.kv_s or 0.0))
            self._times["request_decode_time"].observe(decode_s)
        if (gaps := end.completion_tokens - 1) > 0:
            histogram = self._times["inter_token_latency"]
            histogram.counts[bisect_left(histogram.bounds, decode_s / gaps)] += gaps
            histogram.sum += decode_s


class CountedReply(ReplyEncoder):
    """Encodes the answer of a request, and counts it at its end. Times are those of the clock of
    `names`."""

    __slots__ = ("_cached_tokens", "_names", "begun_s", "prompt_tokens", "received_s")

    def __init__(
        self, send: Callable[[bytes], bool], worker: str, names: VllmNames, prompt_tokens: int
    ) -> None:
        super().__init__(send, worker)
        self._names, self.prompt_tokens, self._cached_tokens = names, prompt_tokens, 0
        self.received_s = self.begun_s = names.now()

    def begin(self, started: Started) -> None:
        self._cached_tokens = started.cached_tokens
        self.begun_s = self._names.now()
        super().begin(started)

    def finish(self, end: Finish) -> None:
        super().finish(end)
        cached = self._cached_tokens if end.cached_tokens is None else end.cached_tokens
        self._names.on_finish(self, cached, end)
