"""The times of an engine's steps: gaps between tokens, and the speed of prefill."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Sequence

from dynamo.inference.sequence import EngineSequence

INITIAL_TOKEN_S = 0.001
DECAY = 0.98
MIN_SPREAD = 0.05
"""Relative spread of the steps' sizes from which on their slope counts instead of their ratio."""


class TokenGaps:
    """Counts of the times between two tokens of an answer, and of those above a target. All answers
    of a batch wait for the same step. Nothing is counted until a request names a target."""

    def __init__(self) -> None:
        self.gaps = self.slow_gaps = 0
        self.target_s = 0.0
        self._last_step_s = 0.0
        self._first_token_s: dict[EngineSequence, float] = {}

    def on_first_token(self, sequence: EngineSequence) -> None:
        """Note a first token that another worker computed. The next one may take many steps."""
        if self.target_s:
            self._first_token_s[sequence] = get_running_loop().time()

    def on_step(self, decode_seqs: int) -> None:
        """Count the tokens of a step that has just ended, `decode_seqs` of them not the first."""
        now = get_running_loop().time()
        if self._first_token_s:
            decode_seqs -= self._count_second_tokens(now)
        self.on_steps((now,), decode_seqs)

    def on_steps(self, ends: Sequence[float], decode_seqs: int) -> None:
        """Count the tokens of steps, also of skipped ones, by the times when they ended."""
        before, target_s, slow = self._last_step_s, self.target_s, 0
        for end in ends:
            slow += end - before > target_s
            before = end
        self._last_step_s = before
        self.gaps += decode_seqs * len(ends)
        self.slow_gaps += decode_seqs * slow

    def _count_second_tokens(self, now: float) -> int:
        """Count the sequences whose first token came from elsewhere and whose second came now."""
        counted = 0
        for sequence, first_s in list(self._first_token_s.items()):
            decoded = sequence.length > sequence.prompt_tokens + 1
            if decoded:
                counted += 1
                self.slow_gaps += now - first_s > self.target_s
            if decoded or sequence.ended:
                del self._first_token_s[sequence]
        self.gaps += counted
        return counted


class PrefillSpeed:
    """A line through the durations of recent steps over their prompt tokens; its slope counts."""

    def __init__(self) -> None:
        self.token_s = INITIAL_TOKEN_S
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Count a step that computed `tokens` prompt tokens."""
        self._n = DECAY * self._n + 1
        self._x = DECAY * self._x + tokens
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + tokens * tokens
        self._xy = DECAY * self._xy + tokens * seconds
        mean = self._x / self._n
        variance = self._xx / self._n - mean * mean
        ratio = self._y / self._x
        slope = 0.0
        if variance > MIN_SPREAD * mean * mean:
            slope = (self._xy / self._n - mean * self._y / self._n) / variance
        self.token_s = min(slope, ratio) if slope > 0 else ratio
