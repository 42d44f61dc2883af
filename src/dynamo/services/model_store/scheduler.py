"""The scheduler of pieces: which piece is asked of which peer. Pure, in anybody's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from statistics import median

MAX_OPEN_REQUESTS = 2
"""Open requests a peer."""
MAX_SOURCE_REQUESTS = 3
BUSY_DELAY_S = 0.02
"""A peer that has no time is asked again after this time."""
SLOW_FACTOR = 3.0
MIN_SLOW_S = 0.1
HANG_S = 15.0
"""A peer that owes a piece and sends nothing for this time does not answer."""
SAMPLE = 256
"""The rarest of so many pieces of a peer is taken."""
SOURCE = ""
"""The name of the source among the peers."""


class _Peer:
    """The state of a peer. `queue` has its pieces in random order, with old ones."""

    def __init__(self) -> None:
        self.pieces: set[int] = set()
        self.queue: list[int] = []
        self.open: dict[int, float] = {}
        self.busy_until = self.active_at = 0.0


class PieceScheduler:
    """Chooses requests for the `missing` pieces of a model.

    A piece that the fewest peers have is asked first. A piece that is late is asked of a second
    peer. The source, where this process may ask it, gives the pieces that no peer has.
    """

    def __init__(self, missing: Iterable[int], rng: Random) -> None:
        self.missing = set(missing)
        self._peers: dict[str, _Peer] = {}
        self._counts: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._durations: deque[float] = deque(maxlen=31)
        self._rng = rng
        self._source: _Peer | None = None

    def use_source(self, allowed: bool) -> None:
        """Allow requests to the source, or end them."""
        if allowed and self._source is None:
            self._source = _Peer()
        elif not allowed and self._source is not None:
            self._close_requests(self._source)
            self._source = None

    def add_pieces(self, peer: str, numbers: Iterable[int]) -> None:
        """Note that a peer has pieces."""
        state = self._peers.setdefault(peer, _Peer())
        for number in numbers:
            if number in self.missing and number not in state.pieces:
                state.pieces.add(number)
                self._counts[number] = self._counts.get(number, 0) + 1
                state.queue.append(number)
                other = self._rng.randrange(len(state.queue))
                state.queue[-1], state.queue[other] = state.queue[other], number

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Its open requests are as if they were never made."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for number in state.pieces:
            self._counts[number] -= 1
        self._close_requests(state)

    def next_requests(self, now: float) -> list[tuple[str, int]]:
        """Return the requests to make now, (peer, piece), which are open from now on."""
        requests = []
        names = list(self._peers)
        self._rng.shuffle(names)
        for name in names:
            peer = self._peers[name]
            while len(peer.open) < MAX_OPEN_REQUESTS and now >= peer.busy_until:
                number = self._choose(peer, now)
                if number is None:
                    break
                requests.append((name, number))
                self._open(peer, number, now)
        source = self._source
        while source is not None and len(source.open) < MAX_SOURCE_REQUESTS:
            wanted = (number for number in self.missing if self._is_source_piece(number))
            if (number := min(wanted, default=None)) is None:
                break
            requests.append((SOURCE, number))
            self._open(source, number, now)
        return requests

    def on_received(self, peer: str, number: int, now: float) -> None:
        """Note that a piece has come and is stored."""
        began = self._close(peer, number)
        if began is not None and peer != SOURCE:
            self._durations.append(now - began)
        self.missing.discard(number)

    def on_failed(self, peer: str, number: int) -> None:
        """Note that a request has ended without its piece."""
        self._close(peer, number)

    def on_busy(self, peer: str, number: int, now: float) -> None:
        """Note that a peer has no time for a request now."""
        self._close(peer, number)
        if peer in self._peers:
            self._peers[peer].busy_until = now + BUSY_DELAY_S * (0.5 + self._rng.random())

    def on_bytes(self, peer: str, now: float) -> None:
        """Note that a part of a piece has come from a peer."""
        if peer in self._peers:
            self._peers[peer].active_at = now

    def hanging(self, now: float) -> list[str]:
        """Return the peers that owe a piece and send nothing."""
        return [
            name
            for name, peer in self._peers.items()
            if peer.open and now - max(peer.active_at, min(peer.open.values())) > HANG_S
        ]

    def silent(self, now: float) -> list[str]:
        """Return the peers that have sent nothing at all, though a piece of theirs is late."""
        late = now - self._late_s()
        return [
            name
            for name, peer in self._peers.items()
            if peer.open and not peer.active_at and min(peer.open.values()) < late
        ]

    def _choose(self, peer: _Peer, now: float) -> int | None:
        """Return the rarest piece of a peer that nobody is asked for, else a late one."""
        best, rarity, seen = None, 0, 0
        dead = 0
        for number in reversed(peer.queue):
            if number not in self.missing:
                dead += 1
                continue
            if not self._asked.get(number):
                count = self._counts[number]
                if best is None or count < rarity:
                    best, rarity = number, count
                seen += 1
                if seen >= SAMPLE:
                    break
        if dead > SAMPLE:
            peer.queue = [number for number in peer.queue if number in self.missing]
        return self._late_piece(peer, now) if best is None else best

    def _late_piece(self, peer: _Peer, now: float) -> int | None:
        """Return the piece of a peer that is longest overdue at one other peer, or at the source,
        which may be busy for long."""
        limit = self._late_s()
        late = [
            (began, number)
            for other in (*self._peers.values(), self._source or peer)
            if other is not peer
            for number, began in other.open.items()
            if now - began > limit
            and number in self.missing
            and number in peer.pieces
            and self._asked[number] == 1
        ]
        return min(late)[1] if late else None

    def _late_s(self) -> float:
        """Return the seconds after which a piece is late."""
        typical_s = median(self._durations) if self._durations else 0.0
        return max(MIN_SLOW_S, SLOW_FACTOR * typical_s)

    def _is_source_piece(self, number: int) -> bool:
        return not self._counts.get(number) and not self._asked.get(number)

    def _open(self, peer: _Peer, number: int, now: float) -> None:
        peer.open[number] = now
        self._asked[number] = self._asked.get(number, 0) + 1

    def _close(self, name: str, number: int) -> float | None:
        peer = self._source if name == SOURCE else self._peers.get(name)
        began = peer.open.pop(number, None) if peer is not None else None
        if began is not None:
            self._asked[number] -= 1
        return began

    def _close_requests(self, peer: _Peer) -> None:
        for number in peer.open:
            self._asked[number] -= 1
        peer.open.clear()
