"""Replica synchronisation: each router publishes what it routes, and applies what others publish.

Events are batched once per turn of the loop, in msgpack. No router depends on another one. The
requests of a dead router are dropped, and a router that joins receives the current state of each
other router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from dynamo.communication.events import Event, Events, EventSource
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS
from dynamo.core.hashing import pack_hashes, unpack_hashes
from dynamo.core.tasks import BackgroundTasks
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt


class RequestRouted(msgspec.Struct, frozen=True, array_like=True, tag="routed"):
    """A request was sent to a worker. `request_key` is unique per publisher; `hashes` are those of
    the prompt's full blocks, packed u64; `emitted` is the number of tokens so far. `prefill`: the
    worker that computes the prompt, if another one. `load_ms`: the predicted time of its loads from
    memory tiers."""

    request_key: str
    worker: str
    prompt_tokens: int
    new_tokens: int
    hashes: bytes = b""
    emitted: int = 0
    first_token_emitted: bool = False
    prefill: str = ""
    load_ms: float = 0.0


class FirstTokenEmitted(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """A request has its first token."""

    request_key: str


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A request left its worker, answered or not."""

    request_key: str
    emitted: int


class TokensReported(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The number of emitted tokens by request key, where it changed."""

    emitted: dict[str, int]


class RoutingStateReset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """All earlier events of this publisher are void; its current state follows."""


RoutingEvent = RequestRouted | FirstTokenEmitted | RequestEnded | TokensReported | RoutingStateReset

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RoutingEvent]).decode


def encode_routing_events(events: Sequence[RoutingEvent]) -> bytes:
    """Encode a batch of events."""
    return _encode(events)


def decode_routing_events(payload: bytes) -> list[RoutingEvent]:
    """Decode a batch; an empty payload is an empty batch. Raises `msgspec.DecodeError`."""
    return _decode(payload) if payload else []


log = logging.getLogger(__name__)

TOKEN_REPORT_INTERVAL_S = 0.5
"""Interval between reports of token counts, which have little effect on costs."""


def routed_event(placed: PlacedRequest) -> RequestRouted:
    """Return the event for a request. After the first token the hashes are left out, since the
    worker's KV events report its blocks."""
    first_token_emitted = placed.first_token_s is not None
    return RequestRouted(
        placed.key,
        placed.answering.name,
        placed.prompt_tokens,
        placed.new_tokens,
        b"" if first_token_emitted else pack_hashes(placed.hashes),
        placed.emitted,
        first_token_emitted,
        "" if placed.decode_worker is None else placed.worker.name,
        placed.load_ms,
    )


class ReplicaSync:
    """Publish the requests of this process for one model, and enter those of other routers in the
    ledger. Nothing is published while there is no other router."""

    def __init__(
        self,
        clock: Clock,
        publisher: str,
        ledger: Ledger,
        *,
        publish: bool = True,
        apply: bool = True,
    ) -> None:
        """`publisher` is this process's instance id. A router process does not `publish`: its
        choices are reservations until the frontends publish them. Frontends that ask routers do
        not `apply` what others publish."""
        self._clock = clock
        self._publisher = publisher
        self._ledger = ledger
        self._publishes = publish
        self._applies = apply
        ledger.reserves = not publish
        ledger.counts_tokens = True
        self._reported_tokens: dict[str, int] = {}
        self._pending_events: list[RoutingEvent] = []
        self._flush_scheduled = False
        self._tasks = BackgroundTasks()
        self._subject = ""
        self._source: EventSource | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self.peers: set[str] = set()

    async def start(self, events: Events, subject: str) -> None:
        """Publish and subscribe under `subject` until `close`."""
        self._subject = subject
        self._source = await events.open_source(subject, self._publisher, self._snapshot)
        self._unsubscribe = await events.subscribe(subject, self._on_event)
        self._tasks.start(self._report_tokens(), "router progress")

    async def close(self) -> None:
        """End the subscription and the source; other routers then drop this process's requests."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._set_peers(set())
        await self._tasks.close()
        if self._source is not None:
            await self._source.close()

    def _publish_routed(self, placed: PlacedRequest) -> None:
        if not placed.peer:
            self._enqueue(routed_event(placed))

    def _publish_first_token(self, placed: PlacedRequest) -> None:
        if not placed.peer:
            self._enqueue(FirstTokenEmitted(placed.key))

    def _publish_ended(self, placed: PlacedRequest, error: BaseException | None) -> None:
        del error
        if not placed.peer:
            self._enqueue(RequestEnded(placed.key, placed.emitted))

    def _enqueue(self, event: RoutingEvent) -> None:
        self._pending_events.append(event)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        events, self._pending_events = self._pending_events, []
        if self._source is not None and events:
            self._source.publish(encode_routing_events(events))

    def _snapshot(self) -> Sequence[bytes]:
        """Return the state that includes all published events. Events that are still pending
        repeat parts of it."""
        return [encode_routing_events(self._current_state())]

    def _current_state(self) -> list[RoutingEvent]:
        requests = self._ledger.requests.values() if self._publishes else ()
        return [routed_event(placed) for placed in requests]

    async def _report_tokens(self) -> None:
        while True:
            await self._clock.sleep(TOKEN_REPORT_INTERVAL_S)
            if not (self.peers and self._publishes):
                continue
            requests = self._ledger.requests
            counts = {key: placed.emitted for key, placed in requests.items()}
            before, self._reported_tokens = self._reported_tokens, counts
            changed = {key: count for key, count in counts.items() if count != before.get(key, 0)}
            if changed:
                self._enqueue(TokensReported(changed))

    def _on_event(self, event: Event) -> None:
        peer = event.publisher
        if peer == self._publisher or event.subject != self._subject:
            return
        if event.kind in {"stale", "repaired"}:
            return
        if event.kind == "gone":
            self._set_peers(self.peers - {peer})
            self._ledger.end_peer(peer)
            return
        if event.kind == "dump":
            self._ledger.end_peer(peer)
        if peer not in self.peers:
            self._set_peers(self.peers | {peer})
        try:
            routing_events = decode_routing_events(event.payload)
        except DECODE_ERRORS as error:
            fields = {"publisher": peer, "error": str(error)}
            log.warning("invalid routing events skipped", extra={"fields": fields})
            return
        if self._applies:
            for routing_event in routing_events:
                self.apply(peer, routing_event)

    def _set_peers(self, peers: set[str]) -> None:
        """Publish while there are peers. The first one may have missed events that were not
        published before, so the whole state is sent."""
        before, self.peers = self.peers, peers
        ledger = self._ledger
        if not self._publishes or bool(before) == bool(peers):
            return
        if before:
            ledger.on_placed.remove(self._publish_routed)
            ledger.on_first_token.remove(self._publish_first_token)
            ledger.on_ended.remove(self._publish_ended)
            return
        ledger.on_placed.append(self._publish_routed)
        ledger.on_first_token.append(self._publish_first_token)
        ledger.on_ended.append(self._publish_ended)
        for event in (RoutingStateReset(), *self._current_state()):
            self._enqueue(event)

    def apply(self, peer: str, event: RoutingEvent) -> None:
        """Enter an event of another router in the ledger."""
        ledger = self._ledger
        requests = ledger.peers.get(peer, {})
        if isinstance(event, RequestRouted):
            if event.request_key not in requests:
                self._apply_routed(peer, event)
        elif isinstance(event, FirstTokenEmitted):
            if (placed := requests.get(event.request_key)) is not None:
                ledger.first_token(placed)
        elif isinstance(event, RequestEnded):
            if (placed := requests.get(event.request_key)) is not None:
                placed.emitted = event.emitted
                ledger.end(placed, None)
        elif isinstance(event, TokensReported):
            for key in event.emitted.keys() & requests.keys():
                requests[key].emitted = event.emitted[key]
        else:
            ledger.end_peer(peer)

    def _apply_routed(self, peer: str, event: RequestRouted) -> None:
        """Enter a peer's request, or claim its reservation. Unknown workers are ignored."""
        ledger, key = self._ledger, event.request_key
        if ledger.claim(peer, key, (event.prefill or event.worker, event.worker)):
            return
        if (worker := ledger.workers.get(event.worker)) is not None:
            ledger.place(
                key,
                worker,
                Prompt(event.prompt_tokens, unpack_hashes(event.hashes)),
                ledger.workers.get(event.prefill),
                new_tokens=event.new_tokens,
                load_ms=event.load_ms,
                peer=peer,
                emitted=event.emitted if event.first_token_emitted else None,
            )
