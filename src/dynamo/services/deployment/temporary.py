"""A deployment that lives as long as a piece of work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.processes.ports import reserve_port
from dynamo.runtime.processes.supervisor import Prepare, Supervisor
from dynamo.services.deployment.launch import deployment_specs
from dynamo.telemetry.logs import LogStream

DeploymentJob = Callable[[str], Coroutine[Any, Any, int]]
"""Called with the URL when all serve: an exit code. Cancelled when the deployment stops."""
LOOPBACK = "127.0.0.1"


def run_with_temporary_deployment(
    settings: Settings,
    work: DeploymentJob,
    *,
    prepare: Prepare | None = None,
    logs: LogStream | None = None,
) -> int:
    """Run a deployment on a free port of this host until `work` is done. Returns its exit code;
    the deployment's where that stops first. Raises what `work` and `prepare` raise."""
    with reserve_port(LOOPBACK, 0) as held:
        port = held.getsockname()[1]
        server = replace(settings.server, http_host=LOOPBACK, http_port=port)
        name = settings.runtime.deployment or f"errand-{os.getpid()}"
        runtime = replace(settings.runtime, deployment=name)
        settings = replace(settings, server=server, runtime=runtime)
        url = f"http://{LOOPBACK}:{port}"
        supervisor = Supervisor(
            deployment_specs(settings),
            deployment_of(settings),
            settings,
            address=url,
            out=logs,
            prepare=prepare,
        )
        return asyncio.run(_run_until_done(supervisor, work, url))


async def _run_until_done(supervisor: Supervisor, work: DeploymentJob, url: str) -> int:
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:  # all results are taken below
        serves = tasks.start(supervisor.run(), "supervisor")
        errand = tasks.start(_start_when_ready(supervisor, work, url), "errand")
        told = tasks.start(supervisor.stopping.wait(), "stopping")
        await asyncio.wait([serves, errand, told], return_when=asyncio.FIRST_COMPLETED)
        errand.cancel()
        await asyncio.wait([errand])
        if not supervisor.stopping.is_set():
            supervisor.stop()
        code = await serves
    return code if errand.cancelled() else errand.result()


async def _start_when_ready(supervisor: Supervisor, work: DeploymentJob, url: str) -> int:
    await supervisor.ready.wait()
    return await work(url)
