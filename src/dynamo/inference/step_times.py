"""The times of an engine's steps: gaps between tokens."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Sequence

from dynamo.inference.sequence import EngineSequence


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
