"""Compares what a view predicts with what the engine then takes from its cache."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import msgspec

from dynamo.inference.engines.engine_blocks import EngineBlocks

log = logging.getLogger(__name__)

WINDOW: Final = 32
"""Number of last comparisons that decide whether a view is wrong."""
MAX_WRONG: Final = 3
MAX_REPAIRS: Final = 3
"""Repairs in a row, each after `MAX_WRONG` wrong predictions, before the view is given up."""


COUNTS = ("checked", "too_high", "too_low", "repairs")


class Prediction(msgspec.Struct, frozen=True):
    """The cached tokens that a view predicts for a request. `removals`: `EngineBlocks.removals` at
    that time. `alone`: no other request was in the engine."""

    tokens: int
    removals: int
    alone: bool


class DriftCheck:
    """Checks one view by every request that is computed without a hand-over.

    Requests change the cache while others wait, so that not every difference is an error. A
    prediction was too high if the engine took less although no block has left the view until the
    end of the answer. A prediction was too low if the engine took more although the request was
    alone. Of the last 32 comparisons 3 predictions that were too high make the view suspect: it is
    repaired. Does that not help three times, the view is given up, and routers predict the cache.

    Predictions that are too low only cost some reuse, and are counted alone: the engine holds
    blocks of which no event can tell any more. `counts` has all of `COUNTS`.
    """

    def __init__(self, blocks: EngineBlocks, repair: Callable[[], object]) -> None:
        """`repair` rebuilds the view."""
        self._blocks = blocks
        self._repair = repair
        self._wrong: deque[bool] = deque(maxlen=WINDOW)
        self._repairs_in_a_row = 0
        self._in_flight = 0
        self.counts = Counter(dict.fromkeys(COUNTS, 0))

    def on_submitted(self, token_ids: bytes, salt: str) -> Prediction:
        """Predict the cached tokens of a request that is given to the engine now."""
        self._in_flight += 1
        tokens = self._blocks.predict(token_ids, salt)
        return Prediction(tokens, self._blocks.removals, self._in_flight == 1)

    def on_ended(self, prediction: Prediction, cached_tokens: int | None) -> None:
        """Compare with the real `cached_tokens` when the answer has ended, so that the events of
        its time have come. None: unknown, or of another engine."""
        self._in_flight -= 1
        if cached_tokens is None or self._blocks.unusable:
            return
        self.counts["checked"] += 1
        wrong = prediction.tokens > cached_tokens and self._blocks.removals == prediction.removals
        if wrong:
            self.counts["too_high"] += 1
        elif prediction.tokens < cached_tokens and prediction.alone:
            self.counts["too_low"] += 1
        self._wrong.append(wrong)
        if sum(self._wrong) >= MAX_WRONG:
            self._wrong.clear()
            self._mend()
        elif len(self._wrong) == WINDOW:
            self._repairs_in_a_row = 0

    def _mend(self) -> None:
        self._repairs_in_a_row += 1
        if self._repairs_in_a_row > MAX_REPAIRS:
            reason = f"its events disagree with its answers after {MAX_REPAIRS} repairs"
            self._blocks.distrust(reason)
            log.error("the KV events of an engine are wrong; its cache is predicted from now on")
            return
        self.counts["repairs"] += 1
        # Some versions send one removal for all copies of a block, others one for each.
        self._blocks.count_copies = False
        log.warning("the view of an engine's cache was wrong and is rebuilt from its events")
        self._repair()
