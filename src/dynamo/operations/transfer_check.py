"""The check of the transfer plane for `dynamo doctor`: which backends work here, and which carries
the KV blocks of each running worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
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
from dynamo.core.errors import PlaneUnavailable, TransferFailed
from dynamo.core.settings import Settings
from dynamo.inference.disaggregation.prefill_peers import region_descriptors
from dynamo.operations.plane_check import quiet_log
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
