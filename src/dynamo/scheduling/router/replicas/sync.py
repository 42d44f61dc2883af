"""Replica synchronisation: each router publishes what it routes, and applies what others publish.

No router depends on another one. The requests of a dead router are dropped, and a router that
joins receives the current state of each other router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from dynamo.communication.events import Event, Events, EventSource
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS
from dynamo.core.hashing import pack_hashes
from dynamo.core.tasks import BackgroundTasks
from dynamo.scheduling.router.replicas.peer_requests import PeerRequests
from dynamo.scheduling.router.replicas.routing_events import (
    FirstTokenEmitted,
    RequestEnded,
    RequestRouted,
    RoutingEvent,
    RoutingStateReset,
    TokensReported,
    decode_routing_events,
    encode_routing_events,
)
from dynamo.scheduling.workers.placed_request import Placement

log = logging.getLogger(__name__)

TOKEN_REPORT_INTERVAL_S = 0.5
"""Interval between reports of token counts, which have little effect on costs."""


def routed_event(worker: str, request: Placement, prefill: str = "") -> RequestRouted:
    """Return the event for a request. After the first token the hashes are left out, since the
    worker's KV events report its blocks."""
    first_token_emitted = request.first_token_s is not None
    return RequestRouted(
        request.id,
        worker,
        request.prompt_tokens,
        request.new_tokens,
        b"" if first_token_emitted else pack_hashes(request.hashes),
        request.emitted,
        first_token_emitted,
        "" if first_token_emitted else prefill,
        request.load_ms,
    )


class ReplicaSync:
    """Publish the requests of this process for one model, and pass those of others to
    `peer_requests`. Nothing is published while there is no other router."""

    def __init__(
        self, clock: Clock, publisher: str, peer_requests: PeerRequests | None = None
    ) -> None:
        """`publisher` is this process's instance id."""
        self._clock = clock
        self._publisher = publisher
        self._peer_requests = peer_requests
        self._requests: dict[str, tuple[str, Placement, str]] = {}
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
        await self._tasks.close()
        if self._source is not None:
            await self._source.close()

    def publish_routed(self, worker: str, request: Placement, prefill: str = "") -> None:
        """Publish that a request is sent to `worker`, its prompt to the worker `prefill`."""
        self._requests[request.id] = worker, request, prefill
        if self.peers:
            self._enqueue(routed_event(worker, request, prefill))

    def publish_first_token(self, request_key: str) -> None:
        """Publish that a request has its first token."""
        if self.peers and request_key in self._requests:
            self._enqueue(FirstTokenEmitted(request_key))

    def publish_ended(self, request_key: str) -> None:
        """Publish that a request left its worker."""
        sent = self._requests.pop(request_key, None)
        if sent is not None and self.peers:
            self._enqueue(RequestEnded(request_key, sent[1].emitted))

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
        return [routed_event(*routed) for routed in self._requests.values()]

    async def _report_tokens(self) -> None:
        while True:
            await self._clock.sleep(TOKEN_REPORT_INTERVAL_S)
            if not self.peers:
                continue
            counts = {key: request.emitted for key, (_, request, _) in self._requests.items()}
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
            self.peers.discard(peer)
            self._remove_peer(peer)
            return
        if event.kind == "dump":
            self._remove_peer(peer)
        self._add_peer(peer)
        try:
            routing_events = decode_routing_events(event.payload)
        except DECODE_ERRORS as error:
            fields = {"publisher": peer, "error": str(error)}
            log.warning("invalid routing events skipped", extra={"fields": fields})
            return
        for routing_event in routing_events:
            self._apply(peer, routing_event)

    def _add_peer(self, peer: str) -> None:
        """Add a peer. The first one may have missed events that were not published before, so the
        whole state is sent."""
        if peer not in self.peers:
            if not self.peers:
                self._enqueue(RoutingStateReset())
                for event in self._current_state():
                    self._enqueue(event)
            self.peers.add(peer)

    def _remove_peer(self, peer: str) -> None:
        if self._peer_requests is not None:
            self._peer_requests.remove_peer(peer)

    def _apply(self, peer: str, event: RoutingEvent) -> None:
        requests = self._peer_requests
        if requests is None:
            return
        if isinstance(event, RequestRouted):
            requests.on_routed(peer, event)
        elif isinstance(event, FirstTokenEmitted):
            requests.on_first_token(peer, event.request_key)
        elif isinstance(event, RequestEnded):
            requests.on_ended(peer, event.request_key, event.emitted)
        elif isinstance(event, TokensReported):
            requests.on_tokens(peer, event.emitted)
        else:
            requests.remove_peer(peer)
