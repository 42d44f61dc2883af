"""Routers that keep in step: each tells the others, over the event plane, what it sends where, and
books what they send. None is needed by another: who dies is forgotten with all its requests, who
joins gets the present state of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from dynamo.communication.events import Event, Events, EventSource
from dynamo.core.clock import Clock
from dynamo.core.hashing import pack_hashes
from dynamo.core.tasks import BackgroundTasks
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

log = logging.getLogger(__name__)

TOKEN_REPORT_INTERVAL_S = 0.5
"""How often tokens are told of, which only weigh in costs."""


class RoutingEventListener(Protocol):
    """Books what other routers do. `peer`: the one that says so."""

    def on_routed(self, peer: str, move: RequestRouted) -> None: ...
    def on_first_token(self, peer: str, name: str) -> None: ...
    def on_tokens(self, peer: str, counts: dict[str, int]) -> None: ...
    def on_ended(self, peer: str, name: str, emitted: int) -> None: ...
    def remove_peer(self, peer: str) -> None: ...


class PublishedRequest(Protocol):
    """The ticket of a request that this process sent out. `id`: unique in this process; `first_s`:
    when its first token came; `emitted`: its tokens until now."""

    id: str
    prompt_tokens: int
    new_tokens: int
    hashes: Sequence[int]
    first_token_s: float | None
    emitted: int


def routed_event(worker: str, own: PublishedRequest) -> RequestRouted:
    """As others are told of it; where the first token is out, events tell of its blocks."""
    first = own.first_token_s is not None
    hashes = b"" if first else pack_hashes(own.hashes)
    return RequestRouted(
        own.id, worker, own.prompt_tokens, own.new_tokens, hashes, own.emitted, first
    )


class ReplicaSync:
    """Both directions for one model: own moves go out, those of others go to `follower`. While
    there is no other router nothing is written."""

    def __init__(
        self, clock: Clock, publisher: str, follower: RoutingEventListener | None = None
    ) -> None:
        """`publisher`: this process's instance id."""
        self._clock = clock
        self._publisher = publisher
        self._listener = follower
        self._requests: dict[str, tuple[str, PublishedRequest]] = {}
        self._reported_tokens: dict[str, int] = {}
        self._pending_events: list[RoutingEvent] = []
        self._flush_scheduled = False
        self._tasks = BackgroundTasks()
        self._subject = ""
        self._source: EventSource | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self.peers: set[str] = set()

    async def start(self, events: Events, subject: str) -> None:
        """Tell and hear under `subject` until `close`."""
        self._subject = subject
        self._source = await events.open_source(subject, self._publisher, self._snapshot)
        self._unsubscribe = await events.subscribe(subject, self._on_event)
        self._tasks.start(self._report_tokens(), "router progress")

    async def close(self) -> None:
        """The others forget what was told."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._tasks.close()
        if self._source is not None:
            await self._source.close()

    def publish_routed(self, worker: str, own: PublishedRequest) -> None:
        """A request was sent out."""
        self._requests[own.id] = worker, own
        if self.peers:
            self._enqueue(routed_event(worker, own))

    def publish_first_token(self, name: str) -> None:
        """Its first token came."""
        if self.peers and name in self._requests:
            self._enqueue(FirstTokenEmitted(name))

    def publish_ended(self, name: str) -> None:
        """It left its worker."""
        sent = self._requests.pop(name, None)
        if sent is not None and self.peers:
            self._enqueue(RequestEnded(name, sent[1].emitted))

    def _enqueue(self, move: RoutingEvent) -> None:
        self._pending_events.append(move)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        moves, self._pending_events = self._pending_events, []
        if self._source is not None and moves:
            self._source.publish(encode_routing_events(moves))

    def _snapshot(self) -> Sequence[bytes]:
        """The state with all that was published; what is still in the queue says it again."""
        return [encode_routing_events(self._current_state())]

    def _current_state(self) -> list[RoutingEvent]:
        return [routed_event(worker, own) for worker, own in self._requests.values()]

    async def _report_tokens(self) -> None:
        while True:
            await self._clock.sleep(TOKEN_REPORT_INTERVAL_S)
            if not self.peers:
                continue
            counts = {name: own.emitted for name, (_, own) in self._requests.items()}
            told, self._reported_tokens = self._reported_tokens, counts
            changed = {name: count for name, count in counts.items() if count != told.get(name, 0)}
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
            moves = decode_routing_events(event.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            fields = {"publisher": peer, "error": str(error)}
            log.warning("bad moves of another router", extra={"fields": fields})
            return
        for move in moves:
            self._apply(peer, move)

    def _add_peer(self, peer: str) -> None:
        """The first other router: it may have missed what was not written before."""
        if peer not in self.peers:
            if not self.peers:
                self._enqueue(RoutingStateReset())
                for move in self._current_state():
                    self._enqueue(move)
            self.peers.add(peer)

    def _remove_peer(self, peer: str) -> None:
        if self._listener is not None:
            self._listener.remove_peer(peer)

    def _apply(self, peer: str, move: RoutingEvent) -> None:
        follower = self._listener
        if follower is None:
            return
        if isinstance(move, RequestRouted):
            follower.on_routed(peer, move)
        elif isinstance(move, FirstTokenEmitted):
            follower.on_first_token(peer, move.request_key)
        elif isinstance(move, RequestEnded):
            follower.on_ended(peer, move.request_key, move.emitted)
        elif isinstance(move, TokensReported):
            follower.on_tokens(peer, move.emitted)
        else:
            follower.remove_peer(peer)
