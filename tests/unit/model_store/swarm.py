"""Processes that fetch a model in virtual time: the real scheduler of pieces on simulated links."""

from __future__ import annotations

from random import Random

from dynamo.services.model_store.files import MAX_UPLOADS
from dynamo.services.model_store.scheduler import SOURCE, PieceScheduler

LINK = 125e6
"""Bytes a second of each direction of a link: 1 Gbit/s."""
STEP_S = 0.05
BUSY_S = 0.001


class Transfer:
    """A piece on its way. `left` are the bytes that are to come."""

    def __init__(self, sender: str, reader: str, number: int, left: float) -> None:
        self.sender, self.reader, self.number, self.left = sender, reader, number, left
        self.rate = 0.0


class Swarm:
    """Readers `0`, `1`, ... of which the first asks the source. Links are shared evenly."""

    def __init__(self, readers: int, pieces: int, piece_bytes: int, seed: int = 0) -> None:
        self.piece_bytes = piece_bytes
        self.pieces = pieces
        self.names = [str(number) for number in range(readers)]
        self.schedulers = {
            name: PieceScheduler(range(pieces), Random(seed + int(name))) for name in self.names
        }
        self.schedulers["0"].use_source(True)
        self.transfers: list[Transfer] = []
        self.source_bytes = 0.0
        self.now = 0.0
        self.done_s: dict[str, float] = {}

    def run(self) -> float:
        """Return the time at which the last reader has all."""
        while len(self.done_s) < len(self.names):
            self._start_requests()
            self._set_rates()
            step = min((each.left / each.rate for each in self.transfers), default=STEP_S)
            step = min(step, STEP_S) + 1e-9
            self.now += step
            for each in list(self.transfers):
                each.left -= each.rate * step
                if each.left <= 1e-6 * self.piece_bytes:
                    self.transfers.remove(each)
                    self._receive(each)
        return max(self.done_s.values())

    def _start_requests(self) -> None:
        for name, scheduler in self.schedulers.items():
            for peer, number in scheduler.next_requests(self.now):
                uploads = sum(each.sender == peer for each in self.transfers)
                if peer != SOURCE and uploads >= MAX_UPLOADS:
                    scheduler.on_busy(peer, number, self.now)
                    continue
                self.transfers.append(Transfer(peer, name, number, self.piece_bytes))

    def _set_rates(self) -> None:
        for each in self.transfers:
            up = sum(other.sender == each.sender for other in self.transfers)
            down = sum(other.reader == each.reader for other in self.transfers)
            each.rate = LINK / max(up, down)

    def _receive(self, transfer: Transfer) -> None:
        scheduler = self.schedulers[transfer.reader]
        if transfer.sender == SOURCE:
            self.source_bytes += self.piece_bytes
        if transfer.number not in scheduler.missing:
            scheduler.on_failed(transfer.sender, transfer.number)
            return
        scheduler.on_received(transfer.sender, transfer.number, self.now)
        if not scheduler.missing:
            self.done_s[transfer.reader] = self.now
        for name, other in self.schedulers.items():
            if name != transfer.reader:
                other.add_pieces(transfer.reader, [transfer.number])
