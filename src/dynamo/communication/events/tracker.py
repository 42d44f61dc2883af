"""What one subscription knows of one source: order, gaps, repair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dynamo.communication.events.outlet import CatchUp
from dynamo.communication.events.plane import Event, Kind, Listener

log = logging.getLogger(__name__)


class Tracker:
    """Passes events on, in order and none twice. `ask(after)` must bring a `CatchUp` to `repair`;
    what arrives before that is dropped, because the answer holds it. `replaces`: the tracker of the
    same publisher's former epoch."""

    def __init__(
        self,
        subject: str,
        publisher: str,
        epoch: int,
        listener: Listener,
        ask: Callable[[int], None],
        replaces: Tracker | None = None,
    ) -> None:
        self._subject = subject
        self._publisher = publisher
        self.epoch = epoch
        self._listener = listener
        self._ask = ask
        self._last = -1
        self._waiting = True
        self._stale = False
        self._replaced_epoch: int | None = None if replaces is None else replaces.epoch
        self.lost: int = 0 if replaces is None else replaces.lost

    def start(self) -> None:
        """Ask for what is not known yet: at first, and whenever a connection was made."""
        self._waiting = True
        self._ask(self._last)

    def events(self, first: int, payloads: Sequence[bytes]) -> None:
        """Live events."""
        if self._waiting:
            return
        known = self._last + 1 - first
        if known < 0:
            self._gap()
            return
        self._pass(first, payloads, known)

    def skipped(self, last: int) -> None:
        """The source's last sequence, where events were withheld from us."""
        if not self._waiting and last > self._last:
            self._gap()

    def interrupted(self) -> None:
        """The connection broke: what comes is not heard until it is made again."""
        if not self._waiting:
            self._waiting = True
            if self._last >= 0:
                self._miss()

    def repair(self, answer: CatchUp) -> None:
        """The answer to `ask`."""
        self._waiting = False
        if answer.dump:
            self._replaced_epoch = None
            self._stale = False
            self._last = answer.last
            first, *rest = answer.payloads or (b"",)
            self._tell("dump", answer.last, first)
            for payload in rest:
                self._tell("event", answer.last, payload)
            return
        if self._replaced_epoch is not None:
            self._tell("gone", 0, b"", self._replaced_epoch)
        if self._last >= 0:
            self.lost += max(0, answer.first - 1 - self._last)
        self._last = max(self._last, answer.first - 1)
        self._replaced_epoch = None
        stale, self._stale = self._stale, False
        known = self._last + 1 - answer.first
        self._pass(answer.first, answer.payloads, known)
        if stale and len(answer.payloads) <= known:
            self._tell("repaired", self._last, b"")

    def gone(self) -> None:
        """The source disappeared."""
        self._tell("gone", max(self._last, 0), b"")

    def _gap(self) -> None:
        self._waiting = True
        self._miss()
        self._ask(self._last)

    def _miss(self) -> None:
        self._stale = True
        self._tell("stale", self._last, b"")

    def _pass(self, first: int, payloads: Sequence[bytes], known: int) -> None:
        sequence = first + known
        for payload in payloads[known:] if known else payloads:
            self._last = sequence
            self._tell("event", sequence, payload)
            sequence += 1

    def _tell(
        self,
        kind: Kind,
        sequence: int,
        payload: bytes,
        epoch: int | None = None,
    ) -> None:
        event = Event(
            self._subject,
            self._publisher,
            self.epoch if epoch is None else epoch,
            sequence,
            payload,
            kind,
        )
        try:
            self._listener(event)
        except Exception:  # a listener's bug must not stop the plane
            log.exception("listener failed", extra={"fields": {"subject": self._subject}})
