"""`configure_dynamo_logging`, under the import path of NVIDIA Dynamo."""

from __future__ import annotations

import os

from dynamo.telemetry.logs import configure_logging


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | None = None) -> None:
    """Write log lines to stderr at the level of `DYN_LOG` or `DYNAMO_LOG`, as JSON with
    `DYN_LOGGING_JSONL`. Raises `ConfigError`."""
    level = os.environ.get("DYN_LOG") or os.environ.get("DYNAMO_LOG") or "info"
    as_json = os.environ.get("DYN_LOGGING_JSONL", "").lower() in {"1", "true"}
    component = service_name or "process"
    name = component if worker_id is None else f"{component}-{worker_id}"
    configure_logging(level, "json" if as_json else "text", name)
