"""The work that one worker does within a promise, by the timing of its steps."""

from __future__ import annotations

import math

import msgspec

from dynamo.core.timing.model import Timing
from dynamo.operations.planner.values import Demand, EngineLimits, Promise

ITL_SHARE = 0.95
"""The part of the promised time between tokens that a full batch takes."""


class Lengths(msgspec.Struct, frozen=True):
    """The mean prompt and answer of the requests of now."""

    prompt: float
    answer: float

    @property
    def context(self) -> float:
        """The mean length of a sequence that decodes."""
        return self.prompt + self.answer / 2


class PromiseCapacity(msgspec.Struct, frozen=True):
    """A worker with this `timing` and these `limits`, and requests of these `lengths`."""

    timing: Timing
    limits: EngineLimits
    promise: Promise
    lengths: Lengths

    @property
    def prompt_ms(self) -> float:
        """The time to compute a prompt alone."""
        timing, tokens = self.timing, self.lengths.prompt
        steps = max(1, math.ceil(tokens / self.limits.step_tokens))
        return timing.c0 * steps + timing.c2 + self.prompt_work_ms(tokens)

    def prompt_work_ms(self, tokens: float) -> float:
        """Return the time that prompt tokens add to the steps which compute them."""
        return (self.timing.c1 + self.timing.c4 * self.lengths.prompt / 2) * tokens

    def batch(self, share: float = ITL_SHARE, *, with_prompts: bool = True) -> float:
        """Return the sequences that decode together within this share of the promised time between
        tokens, with the prompts that are computed between, or without. Below 1: not even one."""
        timing, lengths = self.timing, self.lengths
        most = min(self.limits.max_seqs, self.limits.kv_tokens / max(1.0, lengths.context))
        if math.isinf(self.promise.itl_ms):
            return max(1.0, most)
        each = timing.c2 + timing.c3 * lengths.context
        if with_prompts:
            each += self.prompt_work_ms(lengths.prompt) / max(1.0, lengths.answer)
        room = share * self.promise.itl_ms - timing.c0
        return min(most, room / each) if each > 0 else most

    @property
    def fault(self) -> str:
        """Why no number of workers keeps the promise, or ""."""
        if self.batch() < 1:
            return (
                f"no number of workers keeps {self.promise.itl_ms:g} ms between tokens: one "
                f"sequence alone with its prompts takes more; raise planner.itl"
            )
        if self.prompt_ms > self.promise.ttft_s * 1e3:
            return (
                f"no number of workers keeps {self.promise.ttft_s:g} s to the first token: a "
                f"prompt of {self.lengths.prompt:.0f} tokens alone takes "
                f"{self.prompt_ms / 1e3:.2f} s; raise planner.ttft"
            )
        return ""

    def answer_work_ms(self, batch: float) -> float:
        """Return the time of an engine that a token of an answer takes in a batch of this size."""
        timing = self.timing
        return timing.c0 / max(1.0, batch) + timing.c2 + timing.c3 * self.lengths.context

    def work(self, demand: Demand) -> float:
        """Return the workers that are busy all the time with what arrived."""
        batch = self.batch()
        if batch < 1:  # as if nothing was promised, so that it holds no workers
            batch = self.limits.max_seqs
        answers = demand.requests * self.lengths.answer * self.answer_work_ms(batch)
        return (self.prompt_work_ms(demand.prompt_tokens) + answers) / 1e3 / demand.seconds
