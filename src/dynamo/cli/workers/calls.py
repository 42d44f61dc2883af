"""Calls of commands to single workers of a running deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError, DeadlineExceeded, NotFound

if TYPE_CHECKING:
    from dynamo.core.settings import Settings
    from dynamo.runtime.calls.instances import Instance
    from dynamo.runtime.deployment import Deployment, ProcessRecord
    from dynamo.runtime.distributed import DistributedRuntime

TIMEOUT_S = 10.0


def select_worker(settings: Settings, worker: str) -> tuple[Deployment, str]:
    """Return the deployment of a worker, which is named by its process or its instance, and the
    instance id. Without `runtime.deployment`, all running deployments are searched. Raises
    `ConfigError` if several have such a worker, and `NotFound`."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    running, name = live_deployments(), settings.runtime.deployment or None
    searched = running if name is None and running else select_deployments(running, name)
    workers = {deployment: live_workers(deployment) for deployment in searched}
    matches = [
        (deployment, process.instance)
        for deployment, processes in workers.items()
        for process in processes
        if worker in {process.name, process.instance}
    ]
    if not matches:
        names = sorted({process.name for processes in workers.values() for process in processes})
        hint = f"the workers are: {', '.join(names)}" if names else "`dynamo ps` lists all"
        where = ", ".join(deployment.id for deployment in searched)
        raise NotFound(f"{where}: there is no worker {worker!r}", hint=hint)
    if len(matches) > 1:
        ids = ", ".join(deployment.id for deployment, _ in matches)
        raise ConfigError(
            f"several deployments have a worker {worker!r}",
            hint=f"--deployment names one of: {ids}",
        )
    return matches[0]


def live_workers(deployment: Deployment) -> Sequence[ProcessRecord]:
    """Return the worker processes of a deployment."""
    return [
        process
        for process in deployment.live_processes()
        if process.role == "worker" or process.role.endswith("_worker")
    ]


def find_discovery_url(settings: Settings, deployment: Deployment | None = None) -> str:
    """Return the discovery plane: the server of the settings, else the folder of `deployment`, of
    the one that the settings name, or of the only running one. Raises `ConfigError` and
    `NotFound`."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments
    from dynamo.runtime.planes import planes_of

    url = settings.runtime.discovery or planes_of(settings).discovery
    if settings.runtime.discovery or not url.startswith("file:"):
        return url
    if deployment is None:
        name = settings.runtime.deployment or None
        (deployment,) = select_deployments(live_deployments(), name)
    return deployment.discovery_url


@asynccontextmanager
async def open_command_runtime(settings: Settings, url: str) -> AsyncIterator[DistributedRuntime]:
    """Join the planes of a deployment for the duration of a command."""
    from msgspec.structs import replace

    from dynamo.runtime import DistributedRuntime

    settings = replace(settings, runtime=replace(settings.runtime, discovery=url))
    async with await DistributedRuntime.create(settings, role="command") as runtime:
        yield runtime


async def find_instances(runtime: DistributedRuntime, endpoint: str) -> Mapping[str, Instance]:
    """Return the instances of an endpoint by id, in all namespaces."""
    from dynamo.runtime.calls.instances import decode_instance

    records = (await runtime.discovery.get("/")).items()
    matching = [record for record in records if f"/{endpoint}/" in record[0]]
    instances = [decode_instance(*record) for record in matching]
    return {instance.id: instance for instance in instances if instance is not None}


async def call_worker(
    runtime: DistributedRuntime, instance: Instance, payload: bytes, timeout_s: float = TIMEOUT_S
) -> bytes:
    """Call the endpoint of an instance and return its answer. Raises the errors of the call, and
    `DeadlineExceeded`."""
    from dynamo.core.context import Context

    path = f"{instance.namespace}.{instance.component}.{instance.endpoint}"
    client = await runtime.endpoint(path).client()
    try:
        async with asyncio.timeout(timeout_s):
            return b"".join(await client.collect(instance, payload, Context("command")))
    except TimeoutError:
        raise DeadlineExceeded(
            f"the worker {instance.id} has not answered within {timeout_s:g} s",
            hint="`dynamo ps` shows its state",
        ) from None
    finally:
        await client.close()


def unregistered_error(instance_id: str, url: str) -> ConfigError:
    """The error of a worker that runs here and is not in the discovery plane at `url`."""
    from dynamo.core.redaction import redact_urls

    return ConfigError(
        f"the worker {instance_id} is not registered in {redact_urls(url)}",
        hint="give the flags or the file of the deployment (-f FILE), or its environment, such as "
        "DYNAMO_ETCD_ENDPOINTS",
    )
