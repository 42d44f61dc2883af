"""Computes nothing, takes as long as a real engine would, and says what `tokens` makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Listed
from itertools import accumulate

from dynamo.core.clock import Clock
from dynamo.core.values import EngineInfo, TokenLogprobs
from dynamo.inference.mock.timing import Timing
from dynamo.inference.mock.tokens import Voice
from dynamo.inference.runner import Chunk, PredictableRunner, StepPlan, StepResult
from dynamo.inference.sequence import Sequence

LONGEST_LAG_S = 0.05
"""A loop that falls further behind its modelled times than this does not catch up."""


class MockRunner(PredictableRunner):
    """Steps end at absolute times, one after the other, so that pacing does not drift. Where less
    than `shortest_sleep_s` is left no timer is armed; the loop gets its turn all the same. Without
    `words` every token is 0."""

    def __init__(
        self,
        info: EngineInfo,
        words: Listed[int],
        timing: Timing,
        clock: Clock,
        *,
        speedup_ratio: float = 1.0,
        shortest_sleep_s: float = 0.001,
    ) -> None:
        self._info = info
        self._words = words
        self._timing = timing
        self._clock = clock
        self._seconds_per_ms = 0.001 / speedup_ratio
        self._shortest_sleep_s = shortest_sleep_s
        self._capacity_tokens = info.num_blocks * info.block_tokens
        self._due = 0.0

    async def start(self) -> EngineInfo:
        return self._info

    async def step(self, plan: StepPlan) -> StepResult:
        now = self._clock.now()
        begin = max(self._due, now - LONGEST_LAG_S) if plan.continues else now
        self._due = begin + self._timing.step_ms(plan, self._capacity_tokens) * self._seconds_per_ms
        if self._due - now >= self._shortest_sleep_s:
            await self._clock.sleep_until(self._due)
        else:
            await asyncio.sleep(0)
        if not self._words:
            return StepResult([0 for chunk in plan.chunks if chunk.samples])
        return self._say(plan.chunks)

    def decode_ends(self, seqs: int, context: int, steps: int) -> list[float]:
        times = self._timing.decode_ms(seqs, context, steps, self._capacity_tokens)
        scale = self._seconds_per_ms
        ends = list(accumulate([time * scale for time in times], initial=self._due))
        del ends[0]
        return ends

    def decoded(self, sequences: Listed[Sequence], steps: int) -> Listed[Listed[int]]:
        if not self._words:
            return [(0,) * steps] * len(sequences)
        return [one.slot.say(one.tokens[-1], steps) for one in sequences]

    def skip_to(self, when: float) -> None:
        self._due = when

    async def stop(self) -> None:
        """Nothing is held."""

    def _say(self, chunks: Listed[Chunk]) -> StepResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        asked = False
        for chunk in chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            voice: Voice | None = sequence.slot
            if voice is None:
                voice = sequence.slot = Voice(self._words, sequence.tokens)
            else:
                voice.hear(sequence.tokens[-1])
            tokens.append(voice.next())
            request = sequence.request
            top = None if request is None else request.top_logprobs
            asked = asked or top is not None
            logprobs.append(None if top is None else voice.logprobs(top))
        return StepResult(tokens, logprobs if asked else None)
