"""A plugin that only vLLM imports. The plugin tells vLLM's own statistics: Prometheus metrics at a
port, and a line of JSON for each finished request."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import start_http_server
from vllm.v1.metrics.loggers import PrometheusStatLogger


class Recorder(PrometheusStatLogger):
    """vLLM's logger for Prometheus, as `vllm serve` has it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        start_http_server(int(os.environ["TEST_VLLM_PORT"]), "127.0.0.1")

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **named: Any
    ) -> None:
        """Write down what has finished."""
        super().record(scheduler_stats, iteration_stats, *others, **named)
        rows = [] if iteration_stats is None else iteration_stats.finished_requests
        with Path(os.environ["TEST_VLLM_REQUESTS"]).open("a") as file:
            file.writelines(json.dumps(asdict(row), default=str) + "\n" for row in rows)
