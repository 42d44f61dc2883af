"""The shortest way of a token: from its id to the connection."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from dynamo.application.pace import TIMES, Pace
from dynamo.application.sse import Escapes
from dynamo.communication.http import Response
from dynamo.core.text import Lane, Words


class Form(NamedTuple):
    """An event: what stands before a text's JSON string, where that is found, what follows it."""

    prefix: bytes
    escapes: Escapes
    suffix: bytes


class StreamLane(Lane):
    """One choice of a stream of events. It touches as few objects as can be: from one token of a
    paced stream to the next the processor's caches forget, and what is touched is fetched anew."""

    __slots__ = (
        "_arm",
        "_escapes",
        "_events",
        "_keep",
        "_now",
        "_pace",
        "_pieces",
        "_prefix",
        "_response",
        "_risky",
        "_suffix",
        "_texts",
        "_times",
    )

    def __init__(
        self,
        choice: int,
        response: Response,
        form: Form,
        pace: Pace,
        words: Words,
        kept: array[int],
    ) -> None:
        super().__init__()
        self._response = response
        self._events, self._arm = response.outlet()
        self._prefix, self._escapes, self._suffix = form
        self._texts, self._risky = words.texts, words.risky
        self._pieces = form.escapes.table(words.texts)
        self._pace = pace
        self._now, self._times = pace.now, pace.times[choice]
        self._keep = kept.append

    def token(self, token: int) -> bool | None:
        response = self._response
        if not self.plain or response.congested or not response.open:
            return None
        try:
            piece = self._pieces[token]
        except IndexError:
            return None
        if piece is None or self._risky is not None:
            piece = self._piece(token)
            if piece is None:
                return None
        self.count += 1
        keep, now, times, events = self._keep, self._now, self._times, self._events
        keep(token)  # calling a slot directly is slower in CPython 3.11
        times.append(now())
        if len(times) == TIMES:
            self._pace.count()
        if not events:
            self._arm()
        events.append(self._prefix + piece + self._suffix)
        return True

    def _piece(self, token: int) -> bytes | None:
        text = self._texts[token]
        if text is None or (self._risky is not None and self._risky(text) is not None):
            return None
        piece = self._pieces[token] = self._escapes[text]
        return piece
