"""The ranks of a foreign engine: which answers are in them, and what they hold."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from dynamo.core.reply import EngineRank, KvEventListener
from dynamo.core.values import KvEvent, Load
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.engines.engine_blocks import EngineBlocks
from dynamo.inference.engines.event_reader import KvEventEndpoint, KvEventReader

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


class ForeignRank(EngineRank):
    """A rank whose load is known by the answers in it. `total_blocks` have the card's size.
    `answers` has what its cache was predicted to hold of each prompt, if it is."""

    def __init__(self) -> None:
        self.answers: dict[ForeignAnswer, Prediction | None] = {}
        self.total_blocks = 0
        self.steps = self.gaps = self.slow_gaps = 0

    def enter(self, answer: ForeignAnswer) -> None:
        """Count a request that the engine gets now."""
        left = [each.prefill_tokens for each in self.answers]
        answer.ahead = len(left), sum(left), max(left, default=0)
        self.answers[answer] = None

    def leave(self, answer: ForeignAnswer) -> None:
        """Forget an answer that has ended."""
        del self.answers[answer]

    def on_gap(self, *, slow: bool) -> None:
        """Count a time between two outputs of a request whose router steers these times."""
        self.gaps += 1
        self.slow_gaps += slow

    def count_running(self) -> int:
        """Return how many requests have a token."""
        return sum(answer.tokens > 0 for answer in self.answers)

    def count_active_blocks(self) -> int:
        """Return how many blocks requests use, as far as known."""
        return 0

    @property
    def cached_blocks(self) -> int:
        """The number of cached blocks of the card's size, as far as known."""
        return 0

    def report_load(self) -> Load:
        running = self.count_running()
        return Load(
            running=running,
            waiting=len(self.answers) - running,
            prefill_tokens=sum(answer.prefill_tokens for answer in self.answers),
            active_blocks=self.count_active_blocks(),
            total_blocks=self.total_blocks,
            steps=self.steps,
            gaps=self.gaps,
            slow_gaps=self.slow_gaps,
            cached_blocks=self.cached_blocks,
            timing=() if self.timing_learner is None else self.timing_learner.coefficients,
        )


class ViewedRank(ForeignRank):
    """A data-parallel rank with a view of the blocks that its prefix cache holds, by its events.

    The engine calls `clear` when it has emptied the rank's cache.
    """

    def __init__(
        self,
        block_tokens: int,
        engine_block_tokens: int = 0,
        endpoint: KvEventEndpoint | None = None,
    ) -> None:
        """`endpoint`: where the engine publishes over ZMQ; None for an engine that is polled."""
        super().__init__()
        self.blocks = EngineBlocks(block_tokens, engine_block_tokens)
        self.reader = None if endpoint is None else KvEventReader(self.blocks, endpoint)
        repair = self.blocks.clear if self.reader is None else self.reader.rebuild
        self.drift = DriftCheck(self.blocks, repair)

    def enter(self, answer: ForeignAnswer) -> None:
        super().enter(answer)
        request = answer.request
        self.answers[answer] = self.drift.on_submitted(request.token_ids, request.salt)

    def leave(self, answer: ForeignAnswer) -> None:
        prediction, request = self.answers.pop(answer), answer.request
        computed = request.kv or request.prompt_logprobs is not None  # whatever is cached
        if prediction is not None:
            self.drift.on_ended(prediction, None if computed else answer.cached_tokens)

    def count_active_blocks(self) -> int:
        size = self.blocks.block_tokens
        lengths = (answer.prompt_tokens + answer.tokens for answer in self.answers)
        return min(sum(-(-length // size) for length in lengths), self.total_blocks)

    @property
    def cached_blocks(self) -> int:
        blocks = self.blocks
        return len(blocks) * blocks.engine_block_tokens // blocks.block_tokens

    def on_kv_events(self, listener: KvEventListener) -> None:
        self.blocks.listeners.append(listener)

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        return self.blocks.snapshot()

    @property
    def kv_problem(self) -> str:
        reason = self.blocks.unusable
        return f"KV events of the engine are not used: {reason}" if reason else ""

    @property
    def kv_counts(self) -> Mapping[tuple[str, str], int]:
        subjects = {"blocks": self.blocks.counts, "checks": self.drift.counts}
        if self.reader is not None:
            subjects["messages"] = self.reader.counts
        return {
            (subject, kind): count
            for subject, counts in subjects.items()
            for kind, count in counts.items()
        }

    def open(self) -> None:
        """Start reading, if the engine publishes. Raises `ConfigError`."""
        if self.reader is not None:
            self.reader.open()

    async def close(self) -> None:
        """Stop reading."""
        if self.reader is not None:
            await self.reader.close()

    def clear(self, clears_before: int) -> None:
        """Empty the view after the engine has emptied its cache. `clears_before`: `blocks.clears`
        before the engine was asked. If it has increased since, the engine's own event has come, or
        was lost: no other event would end a reset, and the view stays as the events tell it."""
        if self.blocks.clears == clears_before:
            self.blocks.reset()
