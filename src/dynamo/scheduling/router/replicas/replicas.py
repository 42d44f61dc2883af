"""Routers that keep in step: each tells the others, over the event plane, what it sends where, and
books what they send. None is needed by another: who dies is forgotten with all its requests, who
joins gets the present state of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from dynamo.communication.events import Event, Events, Source
from dynamo.core.clock import Clock
from dynamo.core.hashing import pack_hashes
from dynamo.core.tasks import Tasks
from dynamo.scheduling.router.replicas.moves import (
    Ended,
    FirstToken,
    Move,
    Progress,
    Reset,
    Routed,
    decode_moves,
    encode_moves,
)

log = logging.getLogger(__name__)

PROGRESS_S = 0.5
"""How often tokens are told of, which only weigh in costs."""


class Follower(Protocol):
    """Books what other routers do. `peer`: the one that says so."""

    def routed(self, peer: str, move: Routed) -> None: ...
    def first_token(self, peer: str, name: str) -> None: ...
    def emitted(self, peer: str, counts: dict[str, int]) -> None: ...
    def ended(self, peer: str, name: str, emitted: int) -> None: ...
    def forget(self, peer: str) -> None: ...


class Own(Protocol):
    """The ticket of a request that this process sent out. `id`: unique in this process; `first_s`:
    when its first token came; `emitted`: its tokens until now."""

    id: str
    prompt_tokens: int
    new_tokens: int
    hashes: Sequence[int]
    first_s: float | None
    emitted: int


def move_of(worker: str, own: Own) -> Routed:
    """As others are told of it; where the first token is out, events tell of its blocks."""
    first = own.first_s is not None
    hashes = b"" if first else pack_hashes(own.hashes)
    return Routed(own.id, worker, own.prompt_tokens, own.new_tokens, hashes, own.emitted, first)


class Replicas:
    """Both directions for one model: own moves go out, those of others go to `follower`. While
    there is no other router nothing is written."""

    def __init__(self, clock: Clock, publisher: str, follower: Follower | None = None) -> None:
        """`publisher`: this process's instance id."""
        self._clock = clock
        self._publisher = publisher
        self._follower = follower
        self._own: dict[str, tuple[str, Own]] = {}
        self._told: dict[str, int] = {}
        self._queue: list[Move] = []
        self._armed = False
        self._tasks = Tasks()
        self._subject = ""
        self._source: Source | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self.peers: set[str] = set()

    async def start(self, events: Events, subject: str) -> None:
        """Tell and hear under `subject` until `close`."""
        self._subject = subject
        self._source = await events.source(subject, self._publisher, self._dump)
        self._unsubscribe = await events.subscribe(subject, self._hear)
        self._tasks.start(self._progress(), "router progress")

    async def close(self) -> None:
        """The others forget what was told."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._tasks.close()
        if self._source is not None:
            await self._source.close()

    def routed(self, worker: str, own: Own) -> None:
        """A request was sent out."""
        self._own[own.id] = worker, own
        if self.peers:
            self._tell(move_of(worker, own))

    def first_token(self, name: str) -> None:
        """Its first token came."""
        if self.peers and name in self._own:
            self._tell(FirstToken(name))

    def ended(self, name: str) -> None:
        """It left its worker."""
        sent = self._own.pop(name, None)
        if sent is not None and self.peers:
            self._tell(Ended(name, sent[1].emitted))

    def _tell(self, move: Move) -> None:
        self._queue.append(move)
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._armed = False
        moves, self._queue = self._queue, []
        if self._source is not None and moves:
            self._source.publish(encode_moves(moves))

    def _dump(self) -> Sequence[bytes]:
        """The state with all that was published; what is still in the queue says it again."""
        return [encode_moves(self._present())]

    def _present(self) -> list[Move]:
        return [move_of(worker, own) for worker, own in self._own.values()]

    async def _progress(self) -> None:
        while True:
            await self._clock.sleep(PROGRESS_S)
            if not self.peers:
                continue
            counts = {name: own.emitted for name, (_, own) in self._own.items()}
            told, self._told = self._told, counts
            changed = {name: count for name, count in counts.items() if count != told.get(name, 0)}
            if changed:
                self._tell(Progress(changed))

    def _hear(self, event: Event) -> None:
        peer = event.publisher
        if peer == self._publisher or event.subject != self._subject:
            return
        if event.kind in {"stale", "repaired"}:
            return
        if event.kind == "gone":
            self.peers.discard(peer)
            self._forget(peer)
            return
        if event.kind == "dump":
            self._forget(peer)
        self._meet(peer)
        try:
            moves = decode_moves(event.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            fields = {"publisher": peer, "error": str(error)}
            log.warning("bad moves of another router", extra={"fields": fields})
            return
        for move in moves:
            self._apply(peer, move)

    def _meet(self, peer: str) -> None:
        """The first other router: it may have missed what was not written before."""
        if peer not in self.peers:
            if not self.peers:
                self._tell(Reset())
                for move in self._present():
                    self._tell(move)
            self.peers.add(peer)

    def _forget(self, peer: str) -> None:
        if self._follower is not None:
            self._follower.forget(peer)

    def _apply(self, peer: str, move: Move) -> None:
        follower = self._follower
        if follower is None:
            return
        if isinstance(move, Routed):
            follower.routed(peer, move)
        elif isinstance(move, FirstToken):
            follower.first_token(peer, move.name)
        elif isinstance(move, Ended):
            follower.ended(peer, move.name, move.emitted)
        elif isinstance(move, Progress):
            follower.emitted(peer, move.emitted)
        else:
            follower.forget(peer)
