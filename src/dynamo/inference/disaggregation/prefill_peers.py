"""The prefill workers that a worker knows: found in discovery, connected at their first use.

In a fleet, every worker knows all others, and few exchange blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dynamo.communication.transfer import RegionDescriptor, RegionPeer, TransferPlane
from dynamo.core.context import Context
from dynamo.core.errors import TransferFailed
from dynamo.core.tasks import BackgroundTasks, wait_at_most
from dynamo.core.values import GenerateRequest
from dynamo.inference.disaggregation.messages import (
    TRANSFER_KEY,
    PrefillRequest,
    encode_prefill_request,
    receive_prefill,
)
from dynamo.inference.disaggregation.peer_prefill import PrefillPeer
from dynamo.inference.kv_source import PrefillSink
from dynamo.models.card import BlockIdentity

if TYPE_CHECKING:
    from dynamo.runtime.calls.client import Client
    from dynamo.runtime.calls.instances import Instance

log = logging.getLogger(__name__)

APPEARANCE_S = 1.0
"""Time within which discovery tells all processes of a new instance."""
MAX_SEEN = 4096
"""So many instances that have appeared or were waited for are remembered, also after they left."""


def region_descriptors(instance: Instance) -> tuple[RegionDescriptor, ...]:
    """Return the regions that the instance announced, one for each rank; none if it has none."""
    try:
        return msgspec.convert(
            instance.capabilities.get(TRANSFER_KEY, ()), tuple[RegionDescriptor, ...]
        )
    except msgspec.ValidationError as error:
        fields = {"instance": instance.id, "error": str(error)}
        log.warning("bad description of KV memory", extra={"fields": fields})
        return ()


class InstancePeer(PrefillPeer):
    """An instance of the endpoint `prefill`, as one region of this worker uses it."""

    def __init__(self, client: Client, instance: Instance, plane: TransferPlane) -> None:
        self._client = client
        self._plane = plane
        self._descriptors = region_descriptors(instance)
        self._tasks = BackgroundTasks()
        self._connections: dict[int, asyncio.Task[RegionPeer | TransferFailed]] = {}
        self.instance = instance
        self.ranks = len(self._descriptors)

    async def connect(self, rank: int) -> RegionPeer:
        connection = self._connections.get(rank)
        if connection is None or (
            connection.done() and isinstance(connection.result(), TransferFailed)
        ):
            connection = self._start_connecting(rank)
        region = await asyncio.shield(connection)
        if isinstance(region, TransferFailed):
            raise TransferFailed.of(region.reason, region.message, region.hint)
        return region

    async def prefill(
        self,
        rank: int,
        request: GenerateRequest,
        context: Context,
        have_blocks: int,
        sink: PrefillSink,
    ) -> None:
        call = PrefillRequest(replace(request, group=None), have_blocks, rank)
        payload = encode_prefill_request(call)
        await self._client.call(self.instance, payload, context, partial(receive_prefill, sink))

    async def close(self) -> None:
        """Abort the pulls in flight and end the connections."""
        await self._tasks.close()
        for connection in self._connections.values():
            region = None if connection.cancelled() else connection.result()
            if isinstance(region, RegionPeer):
                await region.close()

    def _start_connecting(self, rank: int) -> asyncio.Task[RegionPeer | TransferFailed]:
        work = self._connect(self._descriptors[rank])
        connection = self._connections[rank] = self._tasks.start(work, "connect to KV memory")
        return connection

    async def _connect(self, descriptor: RegionDescriptor) -> RegionPeer | TransferFailed:
        try:
            return await self._plane.connect(descriptor)
        except TransferFailed as error:
            fields = {"instance": self.instance.id, "reason": error.reason, "error": error.message}
            log.warning("KV memory of a worker is out of reach", extra={"fields": fields})
            return error


class PrefillPeers:
    """The instances of a client as peers of one region of this worker. An instance that does not
    answer for a moment keeps its connections until discovery drops it."""

    def __init__(self, client: Client, plane: TransferPlane, check: PeerCheck) -> None:
        self._client = client
        self._plane = plane
        self._check = check
        self._tasks = BackgroundTasks()
        self._peers: dict[str, InstancePeer] = {}
        self.refused: dict[str, str] = {}
        """Why blocks of present instances are not pulled, by instance."""
        self._seen: dict[str, None] = {}
        self._appeared = asyncio.Event()
        self._unsubscribes = (
            client.on_change(self._refresh),
            client.view.on_instance_removed(self._leave),
        )
        self._refresh()

    async def find(self, instance_id: str) -> InstancePeer | None:
        """Return the peer, or None if it does not serve now. The router may know an instance that
        has just appeared before this worker does, so this waits once for an unknown one. Raises
        `TransferFailed` if its blocks do not fit here."""
        if instance_id not in self._seen:
            await wait_at_most(self._wait_for(instance_id), APPEARANCE_S)
            self._note(instance_id)
        if reason := self.refused.get(instance_id):
            raise TransferFailed.of("refused", f"blocks of {instance_id} are not pulled: {reason}")
        return self._peers.get(instance_id) if instance_id in self._client.instances else None

    def bytes_pulled(self) -> Mapping[str, int]:
        """Return by instance the bytes that were pulled from those that serve now."""
        return {name: peer.bytes_pulled for name, peer in self._peers.items()}

    async def close(self) -> None:
        """End all connections."""
        for unsubscribe in self._unsubscribes:
            unsubscribe()
        await self._tasks.close()
        for peer in self._peers.values():
            await peer.close()

    async def _wait_for(self, instance_id: str) -> None:
        while instance_id not in self._seen:
            self._appeared.clear()
            await self._appeared.wait()

    def _note(self, instance_id: str) -> None:
        if len(self._seen) >= MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[instance_id] = None

    def _refresh(self) -> None:
        for name, instance in self._client.instances.items():
            if name in self._peers or name in self.refused:
                continue
            self._note(name)
            if reason := self._check.refusal(instance):
                self.refused[name] = reason
                fields = {"instance": name, "reason": reason}
                log.warning("blocks of a worker do not fit here", extra={"fields": fields})
            else:
                self._peers[name] = InstancePeer(self._client, instance, self._plane)
        self._appeared.set()

    def _leave(self, instance: Instance) -> None:
        self.refused.pop(instance.id, None)
        peer = self._peers.pop(instance.id, None)
        if peer is not None:
            self._tasks.start(peer.close(), "leave a prefill worker")


class PeerCheck:
    """Compares other workers of the model with this one, whose `capabilities` and `region` it has:
    blocks of other weights, tokenizers or hashes are not pulled."""

    def __init__(
        self, own_id: str, capabilities: Mapping[str, Any], region: RegionDescriptor
    ) -> None:
        self._own_id = own_id
        self._model = capabilities["model"]
        self._blocks = msgspec.convert(capabilities["blocks"], BlockIdentity)
        self._region = region

    def is_candidate(self, instance: Instance) -> bool:
        """Whether the instance serves the model and exposes blocks of another engine: it is another
        process, or has several ranks."""
        engines = len(region_descriptors(instance))
        return (
            engines > (instance.id == self._own_id)
            and instance.capabilities.get("model") == self._model
        )

    def refusal(self, instance: Instance) -> str:
        """Say why blocks of the instance are of no use here; "" if they can be pulled."""
        regions = region_descriptors(instance)
        try:
            blocks = msgspec.convert(instance.capabilities.get("blocks", {}), BlockIdentity)
        except msgspec.ValidationError as error:
            return f"unreadable identity of blocks: {error}"
        if self._region.kv is not None and all(region.kv is not None for region in regions):
            blocks = replace(blocks, block_tokens=None)  # blocks of another length are converted
        differences = self._blocks.describe_differences(blocks)
        reasons = (region.refusal(self._region) for region in regions)
        return differences or next(filter(None, reasons), "")
