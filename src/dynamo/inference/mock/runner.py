"""Computes nothing, takes as long as a real engine would, and says what `tokens` makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Listed
from itertools import accumulate

from dynamo.core.clock import Clock
from dynamo.core.values import EngineInfo, TokenLogprobs
from dynamo.inference.mock.timing import StepTiming
from dynamo.inference.mock.token_generator import MockTokenGenerator
from dynamo.inference.model_runner import PredictableModelRunner, StepChunk, StepPlan, StepResult
from dynamo.inference.sequence import EngineSequence

MAX_LAG_S = 0.05
"""A loop that falls further behind its modelled times than this does not catch up."""


class MockRunner(PredictableModelRunner):
    """Steps end at absolute times, one after the other, so that pacing does not drift. Where less
    than `shortest_sleep_s` is left no timer is armed; the loop gets its turn all the same. Without
    `words` every token is 0."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Listed[int],
        timing: StepTiming,
        clock: Clock,
        *,
        speedup_ratio: float = 1.0,
        min_sleep_s: float = 0.001,
    ) -> None:
        self._info = info
        self._vocabulary = vocabulary
        self._timing = timing
        self._clock = clock
        self._seconds_per_ms = 0.001 / speedup_ratio
        self._min_sleep_s = min_sleep_s
        self._capacity_tokens = info.num_blocks * info.block_tokens
        self._step_end_s = 0.0

    async def start(self) -> EngineInfo:
        return self._info

    async def step(self, plan: StepPlan) -> StepResult:
        now = self._clock.now()
        begin = max(self._step_end_s, now - MAX_LAG_S) if plan.back_to_back else now
        self._step_end_s = (
            begin + self._timing.step_ms(plan, self._capacity_tokens) * self._seconds_per_ms
        )
        if self._step_end_s - now >= self._min_sleep_s:
            await self._clock.sleep_until(self._step_end_s)
        else:
            await asyncio.sleep(0)
        if not self._vocabulary:
            return StepResult([0 for chunk in plan.chunks if chunk.samples])
        return self._sample_chunks(plan.chunks)

    def decode_end_times(self, seqs: int, context: int, steps: int) -> list[float]:
        times = self._timing.decode_ms(seqs, context, steps, self._capacity_tokens)
        scale = self._seconds_per_ms
        ends = list(accumulate([time * scale for time in times], initial=self._step_end_s))
        del ends[0]
        return ends

    def decode_tokens(self, sequences: Listed[EngineSequence], steps: int) -> Listed[Listed[int]]:
        if not self._vocabulary:
            return [(0,) * steps] * len(sequences)
        return [
            sequence.runner_state.generate_tokens(sequence.tokens[-1], steps)
            for sequence in sequences
        ]

    def skip_to(self, when: float) -> None:
        self._step_end_s = when

    async def stop(self) -> None:
        """Nothing is held."""

    def _sample_chunks(self, chunks: Listed[StepChunk]) -> StepResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        asked = False
        for chunk in chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            voice: MockTokenGenerator | None = sequence.runner_state
            if voice is None:
                voice = sequence.runner_state = MockTokenGenerator(
                    self._vocabulary, sequence.tokens
                )
            else:
                voice.append_token(sequence.tokens[-1])
            tokens.append(voice.next_token())
            request = sequence.request
            top = None if request is None else request.top_logprobs
            asked = asked or top is not None
            logprobs.append(None if top is None else voice.logprobs(top))
        return StepResult(tokens, logprobs if asked else None)
