"""A worker's metrics under the names of vLLM, by which gateways balance load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from dynamo.core.adapters import adapter_name
from dynamo.core.codec import ReplyEncoder
from dynamo.core.reply import Engine
from dynamo.core.values import EngineInfo, Finish, Load, Started
from dynamo.telemetry.metrics import Registry

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
MODEL = ("model_name",)


class VllmNames:
    """Adds metrics to those of a worker. Times are known of requests whose engine tells them; the
    time between tokens is the mean of each request."""

    def __init__(self, registry: Registry, engine: Engine, model: str, info: EngineInfo) -> None:
        self._registry = aliases = Registry()
        self._label = (model,)
        self._engine, self._info = engine, info

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
        self._counters = {
            name: aliases.counter(f"{name}_total", text, MODEL).labels(model)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of ended requests"),
                ("generation_tokens", "Tokens of ended requests"),
                ("prefix_cache_queries", "Prompt tokens that were looked up"),
                ("prefix_cache_hits", "Prompt tokens from the cache"),
                ("num_preemptions", "Preemptions of ended requests"),
            )
        }
        self._times = {
            name: aliases.histogram(f"{name}_seconds", text, SECONDS, MODEL).labels(model)
            for name, text in (
                ("request_queue_time", "Time until a step takes a request up"),
                ("request_prefill_time", "Time from there to the first token"),
                ("request_decode_time", "Time from the first token to the end"),
                ("time_to_first_token", "Time until the first token"),
                ("inter_token_latency", "Mean time between the tokens of a request"),
                ("e2e_request_latency", "Time of a request at the worker"),
            )
        }
        registry.add_text(self._render)

    def _adapters(self) -> Mapping[tuple[str, ...], float]:
        paths = self._engine.adapters.paths if self._engine.adapters is not None else ()
        loaded = ",".join(adapter_name(adapter) for adapter in paths)
        return {(loaded, "", str(len(paths)), *self._label): 1}

    def _render(self) -> str:
        lines = self._registry.render().splitlines()
        return "\n".join(
            f"{line[:7]}vllm:{line[7:]}" if line[0] == "#" else f"vllm:{line}" for line in lines
        )

    def on_finish(self, prompt_tokens: int, cached_tokens: int, end: Finish) -> None:
        """Count a request that has ended."""
        counters, times = self._counters, end.times
        counters["prompt_tokens"].inc(prompt_tokens)
        counters["prefix_cache_queries"].inc(prompt_tokens)
        counters["prefix_cache_hits"].inc(cached_tokens)
        counters["generation_tokens"].inc(end.completion_tokens)
        if times is None or times.prefill_s is None:
            return
        counters["num_preemptions"].inc(times.preemptions or 0)
        queue_s, prefill_s = times.queue_s or 0.0, times.prefill_s + (times.kv_s or 0.0)
        decode_s = times.decode_s or 0.0
        for name, seconds in (
            ("request_queue_time", queue_s),
            ("request_prefill_time", prefill_s),
            ("request_decode_time", decode_s),
            ("time_to_first_token", queue_s + prefill_s),
            ("e2e_request_latency", queue_s + prefill_s + decode_s),
        ):
            self._times[name].observe(seconds)
        if (gaps := end.completion_tokens - 1) > 0:
            histogram = self._times["inter_token_latency"]
            histogram.counts[bisect_left(histogram.bounds, decode_s / gaps)] += gaps
            histogram.sum += decode_s


class CountedReply(ReplyEncoder):
    """Encodes the answer of a request, and counts it at its end."""

    __slots__ = ("_cached_tokens", "_names", "_prompt_tokens")

    def __init__(
        self, send: Callable[[bytes], bool], worker: str, names: VllmNames, prompt_tokens: int
    ) -> None:
        super().__init__(send, worker)
        self._names, self._prompt_tokens, self._cached_tokens = names, prompt_tokens, 0

    def begin(self, started: Started) -> None:
        self._cached_tokens = started.cached_tokens
        super().begin(started)

    def finish(self, end: Finish) -> None:
        super().finish(end)
        cached = self._cached_tokens if end.cached_tokens is None else end.cached_tokens
        self._names.on_finish(self._prompt_tokens, cached, end)
