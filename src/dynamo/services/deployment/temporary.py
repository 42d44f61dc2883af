"""A temporary deployment for the duration of one job, e.g. a benchmark."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.core.settings.schema_monitoring import PrometheusSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.processes.ports import reserve_port
from dynamo.runtime.processes.supervisor import Prepare, Supervisor
from dynamo.services.deployment.launch import deployment_specs
from dynamo.telemetry.logs import LogStream

DeploymentJob = Callable[[str], Coroutine[Any, Any, int]]
"""Runs with the URL when all processes serve; returns an exit code. Cancelled if they stop."""
LOOPBACK = "127.0.0.1"
DEFAULT_LOG_LEVEL = "info"
QUIET_LOG_LEVEL = "warn"


def temporary_settings(settings: Settings, prefix: str) -> Settings:
    """Return the settings with a unique deployment name, without a record of requests and data of a
    Prometheus that would outlive the job, and by default with quiet logs."""
    name = settings.runtime.deployment or f"{prefix}-{os.getpid()}"
    level = settings.logging.level
    logging = replace(
        settings.logging, level=QUIET_LOG_LEVEL if level == DEFAULT_LOG_LEVEL else level
    )
    runtime = replace(settings.runtime, deployment=name)
    record = replace(settings.record, enabled=False)
    monitoring = replace(settings.monitoring, prometheus=PrometheusSettings())
    return replace(settings, runtime=runtime, logging=logging, record=record, monitoring=monitoring)


def run_with_temporary_deployment(
    settings: Settings, job: DeploymentJob, prepare: Prepare | None, logs: LogStream
) -> int:
    """Run a deployment on a free port of this host until `job` is done, and return its exit code.

    If the deployment stops first, its exit code is returned. Raises the errors of `job` and
    `prepare`, and the error that keeps a process from starting.
    """
    with reserve_port(LOOPBACK, 0) as reserved:
        port = reserved.getsockname()[1]
        server = replace(settings.server, http_host=LOOPBACK, http_port=port)
        settings = replace(settings, server=server)
        url = f"http://{LOOPBACK}:{port}"
        supervisor = Supervisor(
            deployment_specs(settings),
            deployment_of(settings),
            settings,
            address=url,
            out=logs,
            prepare=prepare,
        )
        return asyncio.run(_run_until_done(supervisor, job, url))


async def _run_until_done(supervisor: Supervisor, job: DeploymentJob, url: str) -> int:
    async def start_when_ready() -> int:
        await supervisor.ready.wait()
        return await job(url)

    async with BackgroundTasks(on_failure=lambda _: None) as tasks:  # all results are taken
        running = tasks.start(supervisor.run(), "supervisor")
        working = tasks.start(start_when_ready(), "job")
        stopping = tasks.start(supervisor.stopping.wait(), "stopping")  # e.g. Ctrl-C
        await asyncio.wait([running, working, stopping], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        await asyncio.wait([working])
        if not supervisor.stopping.is_set():
            supervisor.stop()
        code = await running
    if supervisor.failure is not None:
        raise supervisor.failure.to_error()
    return code if working.cancelled() else working.result()
