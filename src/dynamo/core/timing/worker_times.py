"""The times of a request at a worker: how an engine measures them, and how they are sent."""

from __future__ import annotations

from bisect import bisect_right

import msgspec


class WorkerTimes(msgspec.Struct, frozen=True, array_like=True):
    """The stages of an attempt at its worker. None: the engine does not tell, which is never 0.

    `queue_s` lasts from the worker's receipt until a step or a KV source takes the request up,
    behind `ahead_requests` with `ahead_tokens` prompt tokens to compute, of which one prompt has
    `ahead_longest`. `kv_s` was waited for KV
    blocks of the prompt from `kv_from`: the name of a tier, or "peer". `peer_queue_s` and
    `peer_prefill_s` are the part of it in which a prefill worker had the prompt. `prefill_s` ends
    with the first token. `decode_s` lasts from there to the end, and `gap_s` is its longest pause.
    It includes `kv_after_s`, which was waited for blocks if a prefill worker sampled that token.
    `recomputed_tokens` were computed again after `preemptions`. `decode_beside`: so many other
    sequences were in a step of decode on average.
    """

    queue_s: float | None = None
    ahead_requests: int | None = None
    ahead_tokens: int | None = None
    kv_s: float | None = None
    kv_from: str = ""
    prefill_s: float | None = None
    decode_s: float | None = None
    gap_s: float | None = None
    preemptions: int | None = None
    recomputed_tokens: int | None = None
    peer_queue_s: float | None = None
    peer_prefill_s: float | None = None
    ahead_longest: int | None = None
    kv_after_s: float | None = None
    decode_beside: float | None = None


class StepGaps:
    """The longest gap between the ends of two steps since any step that still matters. A gap hides
    all smaller ones before it, so that a step costs as much with many answers as with one.
    `sequences`: the sum of those in all `steps`."""

    def __init__(self) -> None:
        self.steps = self.sequences = 0
        self.ended_s = 0.0
        self._numbers: list[int] = []
        self._gaps: list[float] = []

    def on_steps(self, ended_s: float, sequences: int, steps: int = 1) -> None:
        """Note the end of a step of so many sequences, or of the last of several equal ones."""
        gap_s = (ended_s - self.ended_s) / steps
        self.steps += steps
        self.sequences += sequences * steps
        self.ended_s = ended_s
        gaps, numbers = self._gaps, self._numbers
        while gaps and gaps[-1] <= gap_s:
            gaps.pop()
            numbers.pop()
        gaps.append(gap_s)
        numbers.append(self.steps)

    def longest_s(self, since: int) -> float:
        """Return the longest gap that ended after the step number `since`."""
        at = bisect_right(self._numbers, since)
        return self._gaps[at] if at < len(self._gaps) else 0.0


class SequenceTimes(msgspec.Struct):
    """The times of one sequence, in seconds of the event loop's clock. `taken_s`: a step or a KV
    source took it up. `kv_began_s`: it waits for KV since then. `paused_s`: it was preempted."""

    queued_s: float
    ahead_requests: int
    ahead_tokens: int
    ahead_longest: int
    taken_s: float | None = None
    kv_began_s: float | None = None
    kv_s: float = 0.0
    kv_from: str = ""
    peer_queue_s: float | None = None
    peer_prefill_s: float | None = None
    first_s: float | None = None
    first_step: int = 0
    first_sequences: int = 0
    paused_s: float = 0.0
    gap_s: float = 0.0
    recomputed_tokens: int = 0
    kv_after_s: float = 0.0
    prompt: WorkerTimes = WorkerTimes()

    def on_taken(self, now: float, tokens: int) -> None:
        """Note that the sequence is taken up, with so many tokens to compute."""
        if self.taken_s is None:
            self.taken_s = now
        elif self.paused_s:
            self.recomputed_tokens += tokens
            if self.first_s is not None:
                self.gap_s = max(self.gap_s, now - self.paused_s)
            self.paused_s = 0.0

    def on_kv_ended(self, now: float) -> None:
        """Note that a KV source has ended."""
        if self.kv_began_s is not None:
            self.kv_s += now - self.kv_began_s
            self.kv_began_s = None
        if self.first_s is not None:  # a peer sampled the first token
            self.kv_after_s = now - self.first_s
            self.gap_s = max(self.gap_s, self.kv_after_s)

    def begin(self, now: float, gaps: StepGaps) -> WorkerTimes:
        """Return the times until the first token, which is there now."""
        self.first_s, self.first_step, self.first_sequences = now, gaps.steps, gaps.sequences
        taken_s = now if self.taken_s is None else self.taken_s
        kv_s = self.kv_s + (0.0 if self.kv_began_s is None else now - self.kv_began_s)
        self.prompt = WorkerTimes(
            queue_s=taken_s - self.queued_s,
            ahead_requests=self.ahead_requests,
            ahead_tokens=self.ahead_tokens,
            ahead_longest=self.ahead_longest,
            kv_s=kv_s,
            kv_from=self.kv_from,
            prefill_s=now - taken_s - kv_s,
            peer_queue_s=self.peer_queue_s,
            peer_prefill_s=self.peer_prefill_s,
        )
        return self.prompt

    def finish(self, now: float, gaps: StepGaps, preemptions: int) -> WorkerTimes:
        """Return all times of an answer that ends now."""
        first_s = now if self.first_s is None else self.first_s
        decode_s, steps = now - first_s, gaps.steps - self.first_step
        beside = (gaps.sequences - self.first_sequences) / steps - 1 if steps else 0.0
        return msgspec.structs.replace(
            self.prompt,
            decode_s=decode_s,
            gap_s=min(decode_s, max(self.gap_s, gaps.longest_s(self.first_step))),
            preemptions=preemptions,
            recomputed_tokens=self.recomputed_tokens,
            kv_after_s=self.kv_after_s,
            decode_beside=round(max(0.0, beside), 1),
        )
