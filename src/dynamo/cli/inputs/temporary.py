"""A temporary deployment, and the configuration of the client that sends it the input."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from dynamo.cli.parsing import served_model_names
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_monitoring import PrometheusSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.processes.ports import reserve_port
from dynamo.runtime.processes.supervisor import Prepare, Supervisor
from dynamo.services.deployment.launch import deployment_specs
from dynamo.telemetry.logs import LogStream
from dynamo_client import DynamoConfig

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


RETRIES = 6
RETRY_DELAY_S = 0.25

InputJob = Callable[[ProgressBar, DynamoConfig], Coroutine[Any, Any, int]]
"""Sends the input to the deployment of the configuration, and returns the exit code."""


def run_in_deployment(settings: Settings, prefix: str, job: InputJob) -> int:
    """Run a deployment, whose name begins with `prefix`, until `job` is done. Return the exit code
    of the first that ends. Raises the errors of both."""
    from dynamo.cli.inputs.temporary import run_with_temporary_deployment, temporary_settings
    from dynamo.services.model_store.preparation import make_preparation
    from dynamo.telemetry.logs import configure_logging
    from dynamo.telemetry.stderr import unblock_stderr

    settings = temporary_settings(settings, prefix)
    served_model_names(settings)
    bar = ProgressBar(unblock_stderr())
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", bar)
    return run_with_temporary_deployment(
        settings,
        lambda url: job(bar, client_config(settings, url)),
        make_preparation([settings], bar),
        bar,
    )


def client_config(settings: Settings, url: str) -> DynamoConfig:
    """Return the configuration of a client of the deployment at `url`."""
    keys = settings.server.api_keys
    return DynamoConfig(
        url,
        api_key=keys[0] if keys else None,
        timeout=settings.server.request_timeout + 5,
        max_retries=RETRIES,
        retry_delay=RETRY_DELAY_S,
    )
