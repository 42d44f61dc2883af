"""The part of a worker that computes prompts for other workers and has prompts computed by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dynamo.communication.transfer import RegionDescriptor, TransferPlane
from dynamo.core.errors import InvalidRequest
from dynamo.core.kv_events import worker_name
from dynamo.core.tasks import wait_at_most
from dynamo.core.values import ROLES_BY_NAME, GenerateRequest
from dynamo.inference.disaggregation.messages import TRANSFER_KEY, PrefillEncoder, PrefillRequest
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill
from dynamo.inference.disaggregation.prefill_endpoint import Handover, compute_for_peer
from dynamo.inference.disaggregation.prefill_peers import PeerCheck, PrefillPeers
from dynamo.inference.disaggregation.remote_prefill import RemotePrefill
from dynamo.inference.worker_metrics import declare_disaggregation_metrics

if TYPE_CHECKING:
    from dynamo.communication.requests import ResponseWriter
    from dynamo.core.reply import Engine
    from dynamo.inference.engine import BatchedEngine
    from dynamo.runtime.component import Component, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime

NAMED_PEERS = 8


class WorkerPrefill(RemotePrefill):
    """Exposes the KV memory of the engines, one for each data-parallel rank, and connects them to
    the other workers of the component. Open it after the engines have started."""

    def __init__(self, runtime: DistributedRuntime, component: Component, engine: Engine) -> None:
        super().__init__(runtime, component)
        self.generate = engine.generate
        self._engines: Sequence[BatchedEngine] = ()
        self._planes: list[TransferPlane] = []
        self._regions: list[RegionDescriptor] = []
        self._peers: list[PrefillPeers] = []
        self._pulled_before: Mapping[str, int] = {}
        self._bytes_by_named_peer: dict[str, float] = {}
        self._other_bytes = 0.0
        self._sources: list[PeerPrefill] = []
        self._only_decodes = runtime.settings.engine.role == "decode"
        self._handover = Handover(runtime.clock)
        self._prefill_endpoint: ServedEndpoint | None = None
        self._generate_endpoint: ServedEndpoint | None = None

    @classmethod
    async def open(
        cls,
        runtime: DistributedRuntime,
        component: Component,
        engine: Engine,
        engines: Sequence[BatchedEngine],
    ) -> Self:
        """Expose the memory of the `engines` that `engine` consists of. Engines without a region
        take no part."""
        worker_prefill = cls(runtime, component, engine)
        if engines and all(engine.runner.region is not None for engine in engines):
            worker_prefill._engines = engines
            for engine in engines:
                await worker_prefill._expose(engine)
        return worker_prefill

    @property
    def capabilities(self) -> Mapping[str, Any]:
        return {TRANSFER_KEY: msgspec.to_builtins(self._regions)} if self._regions else {}

    async def serve(
        self, capabilities: Mapping[str, Any], on_load_changed: Callable[[], None]
    ) -> Sequence[ServedEndpoint]:
        if not self._regions:
            return ()
        await self._follow_peers(capabilities)
        self._prefill_endpoint = await self._serve(capabilities, on_load_changed)
        return (self._prefill_endpoint,)

    async def _compute(self, call: PrefillRequest, outgoing: ResponseWriter) -> None:
        if call.rank >= len(self._engines):
            raise InvalidRequest(f"rank {call.rank}: this worker has {len(self._engines)} ranks")
        sink = PrefillEncoder(outgoing.send)
        engine, context = self._engines[call.rank], outgoing.context
        with self._handover.track_call(call.request):
            await compute_for_peer(engine, call.request, context, call.have_blocks, sink)

    def withdraw_after(self, generate_endpoint: ServedEndpoint) -> None:
        """As in the interface. No router chooses the draining worker for new prompts."""
        self._generate_endpoint = generate_endpoint
        if self._prefill_endpoint is not None:
            self._prefill_endpoint.before_withdrawal = self._hand_over

    def on_request_cancelled(self, request: GenerateRequest) -> None:
        generate_endpoint = self._generate_endpoint
        if generate_endpoint is not None and generate_endpoint.lifecycle.stopping:
            self._handover.on_request_left(request)

    async def _hand_over(self, drain_s: float | None) -> None:
        async def wait() -> None:
            if self._generate_endpoint is not None:
                await self._generate_endpoint.withdraw(drain_s)
            await self._handover.wait_until_done()

        await wait_at_most(wait(), drain_s)

    def set_roles(self, roles: Sequence[str]) -> None:
        self._only_decodes = tuple(roles) == ROLES_BY_NAME["decode"]
        for source in self._sources:
            source.only_decodes = self._only_decodes

    async def close(self) -> None:
        left, self._peers = self._peers, []
        for peers in left:
            await peers.close()
        await super().close()

    async def _expose(self, engine: BatchedEngine) -> None:
        region = engine.runner.region
        assert region is not None  # noqa: S101 - `open` has checked it
        plane = await self._runtime.open_transfer()
        self._planes.append(plane)
        self._regions.append(await plane.expose(region, engine.runner.layout))

    async def _follow_peers(self, capabilities: Mapping[str, Any]) -> None:
        runtime = self._runtime
        check = PeerCheck(runtime.instance_id, capabilities, self._regions[0])
        client = await self._follow(check.is_candidate)
        runtime.health.add_limitation("kv_peers", self._describe_refused)
        declare_disaggregation_metrics(runtime.metrics, self._engines, self._regions[0].slot_bytes)
        runtime.metrics.counter(
            "dynamo_worker_peer_bytes_total",
            "Bytes of KV pulled from the eight workers that sent most, and from all others.",
            ("peer",),
            callback=self._bytes_by_peer,
        )
        for number, plane in enumerate(self._planes):
            engine, peers = self._engines[number], PrefillPeers(client, plane, check)
            self._peers.append(peers)
            rank = number if len(self._engines) > 1 else None
            own_name = worker_name(runtime.instance_id, rank)
            source = PeerPrefill(peers.find, runtime.clock, own_name)
            source.only_decodes = self._only_decodes
            self._sources.append(source)
            engine.kv_source = source

    def _describe_refused(self) -> str:
        reasons = {} if not self._peers else self._peers[0].refused
        return "; ".join(f"blocks of {name} are not pulled: {why}" for name, why in reasons.items())

    def _bytes_by_peer(self) -> Mapping[tuple[str, ...], float]:
        pulled: Counter[str] = Counter()
        for peers in self._peers:
            pulled.update(peers.bytes_pulled())
        named = self._bytes_by_named_peer
        for gone in named.keys() - pulled.keys():
            del named[gone]
        for name, size_bytes in pulled.most_common():
            before = self._pulled_before.get(name, 0)
            more = size_bytes - before if size_bytes >= before else size_bytes
            if name in named or len(named) < NAMED_PEERS:
                named[name] = named.get(name, 0) + more
            else:
                self._other_bytes += more
        self._pulled_before = pulled
        counts: dict[tuple[str, ...], float] = {("other",): self._other_bytes}
        return counts | {(name,): value for name, value in named.items()}
