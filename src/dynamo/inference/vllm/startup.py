"""Start of vLLM's AsyncLLM in a thread, and the reasons for which a start fails."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.engines.startup import starting
from dynamo.telemetry.trace_context import exports_traces

ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.__stdout__",  # is redirected during a start
}
"""Variables that vLLM reads. A fork of a process with threads may hang, hence spawn."""

ADVICE = {
    r"estimated maximum model length is (\d+)": "use --max-model-len {0}",
    r"No available memory for the cache blocks|larger than the available KV cache memory": (
        "lower --max-model-len, or raise --gpu-memory-utilization (CPU: VLLM_CPU_KVCACHE_SPACE)"
    ),
    r"Free memory on device|out of memory|OutOfMemoryError": (
        "lower --gpu-memory-utilization, or stop what else uses the device's memory"
    ),
    r"World size \(\d+\) is larger than the number of available": (
        "lower --tensor-parallel-size or --pipeline-parallel-size"
    ),
}
"""Regular expressions of vLLM's reasons, and what a user can do."""

RecordStatistics = Callable[[int, Any, Any], None]
"""Receives rank, SchedulerStats and IterationStats of each step."""


def start_llm(
    model: Path,
    arguments: Mapping[str, Any],
    processes: EngineProcesses,
    record: RecordStatistics,
    environment: Mapping[str, str],
) -> Any:
    """Return a started AsyncLLM, with these variables. Blocks for half a minute and more.

    Raises `ModelUnavailable` or `ConfigError` with the reason that vLLM's processes have printed.
    """
    for name, value in ENVIRONMENT.items():  # vLLM reads these nowhere else
        os.environ.setdefault(name, value)
    if exports_traces(os.environ):  # by HTTP alone, where vLLM's default is grpc
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    os.environ.update(environment)  # CUDA reads the cards there alone
    logging.logProcesses = True  # vLLM's own format has the process id
    with starting("vLLM", "vllm", processes, ADVICE):
        from vllm import envs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(model=str(model), **arguments).create_engine_config()
        llm = AsyncLLM.from_vllm_config(
            config, stat_loggers=[_make_stat_logger(record)], disable_log_stats=True
        )
        if hasattr(envs, "enable_envs_cache"):  # else variables are read for every token
            envs.enable_envs_cache()
        return llm


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that `function` has: each version of vLLM has others."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _make_stat_logger(record: RecordStatistics) -> type:
    """Return the class of a logger of statistics.

    vLLM adds its own logger for Prometheus, of several microseconds a token, unless one of the
    given ones is a subclass. Nobody reads its metrics here.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StatLogger(PrometheusStatLogger):  # type: ignore[misc]
        """Passes the statistics of all ranks on."""

        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            pass  # the metrics of the base class are not created

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            *_: Any,
            engine_idx: int = 0,
            **__: Any,
        ) -> None:
            record(engine_idx, scheduler_stats, iteration_stats)

        def _ignore(self, *_: Any) -> None:
            pass

        log_engine_initialized = log = record_sleep_state = record_admission_rejection = _ignore

    return StatLogger
