"""Checks of the planes: servers of etcd and NATS, and the transfer of KV blocks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Final

import msgspec

from dynamo.communication.discovery.file import folder_of
from dynamo.communication.options import PlaneOptions
from dynamo.communication.transfer import (
    MemoryRegion,
    RegionDescriptor,
    RegionPeer,
    SlotRead,
    TransferPlane,
    open_transfer,
)
from dynamo.communication.transfer.auto import AutoTransfer
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, PlaneUnavailable, TransferFailed
from dynamo.core.settings import Settings
from dynamo.inference.disaggregation.prefill_peers import region_descriptors
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.planes import planes_of

PROBE_SLOTS: Final = 8
PROBE_SLOT_BYTES: Final = 1 << 20
INSTANCES_TIMEOUT_S: Final = 3.0
MAX_PEERS: Final = 16
NO_BACKEND: Final = "none"


async def check_transfer(settings: Settings) -> tuple[str, bool]:
    """Return which backends work, and whether all running workers can be pulled from.

    The check pulls a few blocks from this process itself by each backend, then connects to the
    workers of the deployment. Raises `TransferFailed` if no backend works.
    """
    planes = planes_of(settings)
    scheme = planes.transfer.partition(":")[0]
    if scheme == "memory":
        return "memory: within one process", True
    with quiet_log():
        text = await _check_own(planes.transfer, planes.messaging_options)
        choices = await _check_workers(settings)
    text = f"{scheme}: {text}"
    if choices:
        counts = (f"{count} by {choice}" for choice, count in Counter(choices).items())
        text = f"{text}; running workers: {', '.join(counts)}"
    return text, not any(choice.startswith(NO_BACKEND) for choice in choices)


async def _check_own(url: str, options: PlaneOptions) -> str:
    """The speed of each backend of the plane, and why others do not work."""
    plane = await open_transfer(url, options)
    region = MemoryRegion.allocate(2 * PROBE_SLOTS, PROBE_SLOT_BYTES)
    try:
        descriptor = await plane.expose(region, "doctor")
        peers, rejected = await _connect_by_each(plane, descriptor)
        speeds = [f"{peer.backend} {await _measure(peer):.1f} GB/s" for peer in peers]
    finally:
        await plane.close()
        region.close()
    if not speeds:
        raise TransferFailed.of("gone", f"no backend of {url} works: {'; '.join(rejected)}")
    return ", ".join([*speeds, *(f"not {reason}" for reason in rejected)])


async def _connect_by_each(
    plane: TransferPlane, descriptor: RegionDescriptor
) -> tuple[list[RegionPeer], list[str]]:
    peers, rejected = [], []
    for endpoint in descriptor.endpoints:
        try:
            only = msgspec.structs.replace(descriptor, endpoints=(endpoint,))
            peers.append(await plane.connect(only))
        except TransferFailed as error:
            rejected.append(f"{endpoint.partition(':')[0]} ({error.message})")
    return peers, rejected


async def _measure(peer: RegionPeer) -> float:
    """The GB/s of a pull."""
    reads = [SlotRead(slot, 0, PROBE_SLOTS + slot) for slot in range(PROBE_SLOTS)]
    await peer.pull(reads)  # the first one finds the pages
    started_s = perf_counter()
    await peer.pull(reads)
    return PROBE_SLOTS * PROBE_SLOT_BYTES / (perf_counter() - started_s) / 1e9


async def _check_workers(settings: Settings) -> Sequence[str]:
    """The backend for each worker of the running deployment, and why not a quicker one."""
    discovery = planes_of(settings).discovery
    if discovery.startswith("memory:"):
        return ()
    if discovery.startswith("file:") and not folder_of(discovery).is_dir():
        return ()  # nothing runs there
    async with await DistributedRuntime.create(settings, role="doctor") as runtime:
        try:
            async with asyncio.timeout(INSTANCES_TIMEOUT_S):
                namespace = settings.runtime.namespace
                instances = await runtime.component_registry.instances(namespace)
        except (TimeoutError, PlaneUnavailable):
            return ()  # the check of the servers says why
        regions = dict.fromkeys(region for i in instances for region in region_descriptors(i))
        return [await _choose(runtime, descriptor) for descriptor in list(regions)[:MAX_PEERS]]


async def _choose(runtime: DistributedRuntime, descriptor: RegionDescriptor) -> str:
    """The backend that a worker on this host would use for a peer."""
    plane = await runtime.open_transfer()
    region = MemoryRegion.allocate(1, descriptor.slot_bytes)
    rejected: dict[str, str] = {}
    try:
        await plane.expose(region, descriptor.layout)
        if isinstance(plane, AutoTransfer):
            peer, rejected = await plane.choose(descriptor)
        else:
            peer = await plane.connect(descriptor)
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in rejected.items())
        return f"{peer.backend} ({reasons})" if reasons else peer.backend
    except TransferFailed as error:
        return f"{NO_BACKEND} ({error.message})"
    finally:
        await plane.close()
        region.close()


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
