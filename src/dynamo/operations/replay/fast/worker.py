"""A simulated worker as a state machine: its steps are events, and steady decode steps are one.

The worker schedules as `StepScheduler` does: running sequences first, then waiting ones while
tokens, batch slots and blocks are left, prompts in chunks. Sequences that decode are counted, not
visited: each gets one token a step until the step in which it ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from dynamo.core.values import EngineInfo, KvEvent
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.operations.latency_summary import LatencyHistogram
from dynamo.operations.replay.fast.request import FastRequest
from dynamo.operations.replay.fast.run_cache import RunCache
from dynamo.operations.replay.fast.step_time import Leap, StepTime

GAP_SPREAD = 0.02
"""The gaps of a leap are counted in parts within which they differ by this share."""
MAX_GAP_PARTS = 8


class WorkerListener(ABC):
    """Gets what happens at workers."""

    @abstractmethod
    def on_first_token(self, request: FastRequest) -> None:
        """Take note of a first token."""

    @abstractmethod
    def on_finished(self, request: FastRequest) -> None:
        """Take note of an end."""

    @abstractmethod
    def on_kv_events(self, number: int, events: Sequence[KvEvent]) -> None:
        """Take note of units that the worker of that number has cached or evicted."""


class FastWorker:
    """A worker, or one of its ranks. `wake(worker, when)` asks for `on_wake` at that time; a later
    call replaces it.

    `steps` counts the steps that have ended. A request that decodes had its first token at the end
    of the step `first_step`.
    """

    def __init__(
        self,
        number: int,
        info: EngineInfo,
        step_time: StepTime,
        cache: RunCache,
        gaps: LatencyHistogram,
        kv_events: KvEventBuffer | None,
        wake: Callable[[FastWorker, float], None],
        listener: WorkerListener,
    ) -> None:
        self.number = number
        self.info = info
        self.cache = cache
        self.steps = self.preemptions = self.wakes = 0
        self.waiting: deque[FastRequest] = deque()
        self.prefilling: list[FastRequest] = []
        self.running: dict[FastRequest, None] = {}
        self._listener = listener
        self._time = step_time
        self._block_tokens = info.block_tokens
        self._gaps = gaps
        self.kv_events = kv_events
        self._wake = wake
        self._ends: list[tuple[int, int, FastRequest]] = []
        self._decoding = self._context = 0
        self._crossings = [0] * info.block_tokens
        self._leap: Leap | None = None
        self._leap_began_s = 0.0
        self._leap_steps = 0
        self._sampled: list[FastRequest] = []
        self._step_s = 0.0
        self._counted_s, self._steps_now = -1.0, 0
        self.is_busy = False

    def add(self, request: FastRequest, now: float) -> None:
        """Queue a request. A leap ends with the step that is being computed."""
        request.worker = self.number
        self.waiting.append(request)
        if self._leap is not None:
            steps = self._leap.steps_until(now - self._leap_began_s)
            if steps < self._leap_steps:
                self._leap_steps = steps
                self._wake(self, self._leap_began_s + self._leap.duration_s(steps))

    def emitted(self, request: FastRequest, now: float) -> int:
        """Return the tokens that a request has got by `now`."""
        if not request.first_step:
            return request.recomputed
        if now != self._counted_s:
            self._counted_s, self._steps_now = now, self._count_steps(now)
        return request.recomputed + self._steps_now - request.first_step + 1

    def _count_steps(self, now: float) -> int:
        """Return how many steps have ended by `now`."""
        if self._leap is None:
            return self.steps
        return self.steps + min(self._leap.steps_ended(now - self._leap_began_s), self._leap_steps)

    def begin(self, now: float) -> None:
        """Begin a step, or a leap of steps that only decode. Call while the worker is idle."""
        if not (self.running or self.waiting):
            return
        preemptions = self.preemptions
        if self._decoding:
            self._grow()
        decoding, context = self._decoding, self._context
        # Chunks of running prompts, as the step scheduler plans them.
        budget = self.info.max_num_batched_tokens - decoding
        new_tokens, sequences, attention = 0, decoding, 0.0
        for request in self.prefilling.copy() if self.prefilling else ():
            if budget <= 0:
                break
            count = min(request.length - request.computed, budget)
            if not self._allocate(request, request.computed + count):
                break
            attention += count * (request.computed + count / 2)
            self._plan_chunk(request, count)
            budget -= count
            new_tokens += count
            sequences += 1
        # Then waiting requests, unless this step has preempted one.
        may_admit = preemptions == self.preemptions or not sequences
        while self.waiting and budget > 0 and may_admit:
            request = self.waiting[0]
            if len(self.running) >= self.info.max_num_seqs or not self._admit(request):
                break
            self.waiting.popleft()
            count = min(request.length - request.computed, budget)
            self._allocate(request, request.computed + count)
            attention += count * (request.computed + count / 2)
            self._plan_chunk(request, count)
            budget -= count
            new_tokens += count
            sequences += 1
        if new_tokens or not decoding:
            self.is_busy = bool(sequences)
            if sequences:
                counts = new_tokens, sequences, decoding, context, attention
                self._step_s = self._time.step_s(*counts)
                self._wake(self, now + self._step_s)
            return
        self.is_busy = True
        self._begin_leap(now)

    def on_wake(self, now: float) -> None:
        """End the step or the leap, and give tokens and ends away. The worker is then idle."""
        self.is_busy, self._counted_s = False, -1.0
        if (leap := self._leap) is not None:
            self._leap = None
            self._count_gaps(leap, self._leap_steps)
            self._advance(self._leap_steps)
        elif self._decoding:
            self._gaps.add(self._step_s, self._decoding)
            self._advance(1)
        else:
            self.steps += 1
        sampled, self._sampled = self._sampled, []
        for request in sampled:
            self._start_answer(request, now)
        ends, steps = self._ends, self.steps
        while ends and ends[0][0] <= steps:
            if (request := heappop(ends)[2]).end_step == steps:
                self._finish(request, now)
        if self.kv_events is not None and (events := self.kv_events.drain()):
            self._listener.on_kv_events(self.number, events)

    def _begin_leap(self, now: float) -> None:
        steps = self._ends[0][0] - self.steps
        if steps > 1:  # the blocks of the first step are allocated
            steps = 1 + self._steps_with_blocks(steps - 1)
        self._leap = self._time.leap(self._decoding, self._context)
        self._leap_began_s, self._leap_steps = now, steps
        self._wake(self, now + self._leap.duration_s(steps))

    def _advance(self, steps: int) -> None:
        """Let every decoding sequence grow by a token in each of these steps. The blocks of the
        first one are allocated."""
        if steps > 1:
            self.cache.allocate(self._blocks_needed(self.steps + 1, steps - 1))
        self.steps += steps
        self._context += steps * self._decoding

    def _blocks_needed(self, first: int, steps: int) -> int:
        """Count the sequences that begin a block in these steps."""
        size, crossings = self._block_tokens, self._crossings
        if steps == 1:
            return crossings[first % size]
        whole, rest = divmod(steps, size)
        at = first % size
        need = sum(crossings[at : at + rest]) + sum(crossings[: max(0, at + rest - size)])
        return whole * self._decoding + need

    def _steps_with_blocks(self, steps: int) -> int:
        """Return how many of `steps` after the next one have blocks."""
        available, first = self.cache.available, self.steps + 1
        if self._blocks_needed(first, steps) <= available:
            return steps
        low, high = 0, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self._blocks_needed(first, middle) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    def _grow(self) -> None:
        """Allocate the blocks of the next decode step, preempting the last sequences."""
        need = self._blocks_needed(self.steps, 1)
        while need > self.cache.available and len(self.running) > 1:
            self._preempt(next(reversed(self.running)))
            need = self._blocks_needed(self.steps, 1)
        if need:
            self.cache.allocate(min(need, self.cache.available))

    def _admit(self, request: FastRequest) -> bool:
        """Give a waiting request its cached runs if all of its tokens fit into blocks now."""
        cache, size = self.cache, self._block_tokens
        full = (request.length - 1) // size
        matched = cache.match(request.keys, 0, min(request.units, -(-full // cache.unit)))
        cached, unused = cache.count(matched)
        blocks = min(full, cached)
        if -(-request.length // size) - blocks > cache.available - unused:
            return False
        request.held = cache.take(matched)
        request.held_units = sum([units for _, units in matched])
        request.run_blocks, request.own_blocks = cached, blocks - cached
        request.computed = blocks * size
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = request.computed
        self.running[request] = None
        self.prefilling.append(request)
        return True

    def _allocate(self, request: FastRequest, end: int) -> bool:
        """Allocate the blocks of a request up to the position `end`."""
        need = -(-end // self._block_tokens) - request.run_blocks - request.own_blocks
        while need > self.cache.available:
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is request:
                return False
        if need > 0:
            self.cache.allocate(need)
            request.own_blocks += need
        return True

    def _plan_chunk(self, request: FastRequest, count: int) -> None:
        """Compute `count` tokens of a prompt. Its runs are cached as soon as they are planned."""
        request.computed += count
        if request.computed == request.length:
            self._sampled.append(request)
        cache, at = self.cache, request.held_units
        full = min(request.computed // self._block_tokens, request.named_blocks)
        units = request.units if full == request.named_blocks else full // cache.unit
        blocks = min(units * cache.unit, full) - request.run_blocks
        if blocks > 0 and units >= at:
            cache.register(request.held, request.keys, at, units, blocks)
            request.held_units = units
            request.run_blocks += blocks
            request.own_blocks -= blocks

    def _start_answer(self, request: FastRequest, now: float) -> None:
        """Count the token that the last step sampled after the prompt."""
        self.prefilling.remove(request)
        self._decoding += 1
        request.length += 1
        request.first_step = self.steps
        request.end_step = self.steps + request.output_tokens - request.recomputed - 1
        self._context += request.length
        self._crossings[(self.steps + 1 - request.length) % self._block_tokens] += 1
        heappush(self._ends, (request.end_step, request.row, request))
        if not request.recomputed:
            request.first_token_s = now
            self._listener.on_first_token(request)

    def _stop_answer(self, request: FastRequest) -> int:
        """Take a decoding request out of the sums, and return its length."""
        length = request.length + self.steps - request.first_step
        self._decoding -= 1
        self._context -= length
        key = (request.first_step + 1 - request.length) % self._block_tokens
        self._crossings[key] -= 1
        return length

    def _finish(self, request: FastRequest, now: float) -> None:
        length = self._stop_answer(request)
        del self.running[request]
        self._release(request, length - 1)
        request.end_s, request.end_step = now, -1
        self._listener.on_finished(request)

    def _preempt(self, request: FastRequest) -> None:
        """Give the blocks of a running sequence away, to compute it again later."""
        self.preemptions += 1
        del self.running[request]
        if request.first_step:
            emitted = request.recomputed + self.steps - request.first_step + 1
            length = self._stop_answer(request)
            self._release(request, length - 1)
            request.length, request.recomputed = length, emitted
            request.first_step = request.end_step = 0
        else:
            self.prefilling.remove(request)
            if request in self._sampled:
                self._sampled.remove(request)
            self._release(request, request.computed)
        request.computed = 0
        self.waiting.appendleft(request)

    def _release(self, request: FastRequest, computed: int) -> None:
        """Release the blocks of a sequence. Full blocks that no other finds stay cached, too."""
        full = max(0, computed // self._block_tokens - request.run_blocks)
        others = -(-computed // self._block_tokens) - request.run_blocks - full
        self.cache.release(request.held, full, others)
        request.held = []
        request.held_units = request.run_blocks = request.own_blocks = 0

    def _count_gaps(self, leap: Leap, steps: int) -> None:
        """Count the times between tokens of a leap in a few parts."""
        first, last = leap.step_s(0), leap.step_s(steps - 1)
        spread = abs(last - first) / max(1e-9, min(first, last))
        parts = min(steps, MAX_GAP_PARTS, 1 + math.ceil(spread / GAP_SPREAD))
        done, done_s = 0, 0.0
        for part in range(1, parts + 1):
            until = steps * part // parts
            until_s = leap.duration_s(until)
            self._gaps.add((until_s - done_s) / (until - done), (until - done) * self._decoding)
            done, done_s = until, until_s
