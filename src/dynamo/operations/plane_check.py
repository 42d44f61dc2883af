"""The check of etcd and NATS for `dynamo doctor`: library, connection, credentials, secret."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, PlaneUnavailable
from dynamo.core.settings import Settings
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime

CONNECT_TIMEOUT_S: Final = 3.0
CALL_TIMEOUT_S: Final = 2.0
MAX_INSTANCES: Final = 16
SECRET_SETTING: Final = "security.secret"  # noqa: S105 - the name that refusals contain


async def check_plane_servers(settings: Settings) -> str:
    """Return what was reached. Raises `ConfigError` for a missing library, `PlaneUnavailable` for a
    server that does not answer or refuses the credentials, and `InstanceGone` for a process of the
    deployment that refuses the secret."""
    with quiet_log():
        async with await DistributedRuntime.create(settings, role="doctor") as runtime:
            await _wait_connected(runtime)
            instances = await runtime.component_registry.instances(settings.runtime.namespace)
            by_address = {instance.address: instance for instance in instances}
            checked = list(by_address.values())[:MAX_INSTANCES]
            refusals = await _call_all(runtime, checked)
    if refusals:
        instance, error = refusals[0]
        raise InstanceGone(
            f"{len(refusals)} of {len(checked)} processes refuse calls, of which {instance.id} of "
            f"{instance.component}: {error.message}",
            hint="give all processes the same security.secret and certificates",
        )
    return f"servers answer; {len(checked)} processes accept calls"


async def _wait_connected(runtime: DistributedRuntime) -> None:
    """Wait for the servers of all planes. Raises `PlaneUnavailable`."""
    planes = (runtime.discovery, runtime.requests, runtime.events)
    end_s = runtime.clock.now() + CONNECT_TIMEOUT_S
    while reasons := [plane.connection_error for plane in planes if plane.connection_error]:
        if runtime.clock.now() > end_s:
            hint = "start the server, or correct its URL, user and password in the settings"
            raise PlaneUnavailable(reasons[0], hint=hint)
        await runtime.clock.sleep(0.05)


async def _call_all(
    runtime: DistributedRuntime, instances: Sequence[Instance]
) -> list[tuple[Instance, DynamoError]]:
    """Call an endpoint that no process has. Returns the instances that refuse the connection."""
    refusals: list[tuple[Instance, DynamoError]] = []
    for instance in instances:
        context = Context("doctor", timeout_s=CALL_TIMEOUT_S)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await runtime.requests.call(
                    instance.address, "doctor", b"", context, lambda _: True
                )
        except InstanceGone as error:
            if SECRET_SETTING in error.message:  # a dead instance may be listed for a while
                refusals.append((instance, error))
        except (DynamoError, TimeoutError):
            continue
    return refusals


@contextmanager
def quiet_log() -> Iterator[None]:
    """Log nothing: the finding says it."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
