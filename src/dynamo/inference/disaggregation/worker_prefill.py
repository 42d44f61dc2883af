"""The part of a worker that computes prompts for other workers and has prompts computed by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dynamo.communication.transfer import RegionDescriptor, TransferPlane
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.disaggregation.messages import PREFILL_ENDPOINT, TRANSFER_KEY
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill
from dynamo.inference.disaggregation.prefill_endpoint import PrefillEndpoint
from dynamo.inference.disaggregation.prefill_peers import PrefillPeers, matches
from dynamo.inference.worker_metrics import declare_disaggregation_metrics
from dynamo.runtime.calls.failure_detector import FailureDetector

if TYPE_CHECKING:
    from dynamo.inference.engine import BatchedEngine
    from dynamo.runtime.component import Component, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime


class WorkerPrefill:
    """Exposes the KV memory of the engines, one for each data-parallel rank, and connects them to
    the other workers of the component. Open it after the engines have started."""

    def __init__(self, runtime: DistributedRuntime, component: Component) -> None:
        self._runtime = runtime
        self._component = component
        self._engines: Sequence[BatchedEngine] = ()
        self._planes: list[TransferPlane] = []
        self._regions: list[RegionDescriptor] = []
        self._peers: list[PrefillPeers] = []
        self._tasks = BackgroundTasks()

    @classmethod
    async def open(
        cls,
        runtime: DistributedRuntime,
        component: Component,
        engines: Sequence[BatchedEngine],
    ) -> Self:
        """Expose the engines' memory. Engines without a region take no part."""
        worker_prefill = cls(runtime, component)
        if engines and all(engine.runner.region is not None for engine in engines):
            worker_prefill._engines = engines
            for engine in engines:
                await worker_prefill._expose(engine)
        return worker_prefill

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """The part of the instance record that other workers need."""
        return {TRANSFER_KEY: msgspec.to_builtins(self._regions)} if self._regions else {}

    async def serve(
        self, capabilities: Mapping[str, Any], on_load_changed: Callable[[], None]
    ) -> Sequence[ServedEndpoint]:
        """Follow the other workers with these `blocks`, then serve the endpoint `prefill`."""
        if not self._regions:
            return ()
        await self._follow_peers(capabilities["blocks"])
        handler = PrefillEndpoint(self._engines, on_load_changed).handle
        endpoint = self._component.endpoint(PREFILL_ENDPOINT)
        return (await endpoint.serve(handler, capabilities=capabilities),)

    async def close(self) -> None:
        """Leave the other workers. A second call does nothing."""
        left, self._peers = self._peers, []
        for peers in left:
            await peers.close()
        await self._tasks.close()

    async def _expose(self, engine: BatchedEngine) -> None:
        region = engine.runner.region
        assert region is not None  # noqa: S101 - `open` has checked it
        plane = await self._runtime.open_transfer()
        self._planes.append(plane)
        self._regions.append(await plane.expose(region, engine.runner.layout))

    async def _follow_peers(self, blocks: object) -> None:
        runtime = self._runtime
        is_peer = partial(
            matches, own_id=runtime.instance_id, blocks=blocks, own_regions=self._regions
        )
        client = await self._component.endpoint(PREFILL_ENDPOINT).client(is_peer)
        detector = FailureDetector(
            runtime.requests, runtime.clock, self._tasks, runtime.metrics, spares_last=False
        )
        detector.watch(client)
        declare_disaggregation_metrics(runtime.metrics, self._engines, self._regions[0].slot_bytes)
        for engine, plane in zip(self._engines, self._planes, strict=True):
            peers = PrefillPeers(client, plane)
            self._peers.append(peers)
            engine.kv_source = PeerPrefill(peers.find, runtime.clock, runtime.instance_id)
