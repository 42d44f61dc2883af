"""A simulated worker as a state machine: its steps are events, and steady decode steps are one.

The worker schedules as `StepScheduler` does: running sequences first, then waiting ones while
tokens, batch slots and blocks are left, prompts in chunks. Sequences that decode are counted, not
visited: each gets one token a step until the step in which it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from dynamo.core.timing.model import Counts
from dynamo.core.values import EngineInfo, Load
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.operations.latency_summary import LatencyHistogram
from dynamo.operations.replay.fast.request import FastRequest, WorkerListener
from dynamo.operations.replay.fast.run_cache import Held, RunCache
from dynamo.operations.replay.fast.step_time import Leap, StepTime
from dynamo.operations.replay.fast.tiers import FastTiers, LoadListener, UnitLoad

NOTHING: list[Held] = []


class FastWorker(LoadListener):
    """A worker, or one of its ranks, and its number among all ranks. `wake(worker, when)` asks for
    `on_wake` at that time; a later call replaces it. `stopped`: the worker is gone. Gaps
    between tokens above `gap_target_s`, if any, are reported. `leap`, `leap_steps`: the steps that
    only decode, if the worker is in such.

    `steps` counts the steps that have ended, from 1. A request that decodes had its first token at
    the end of the step `first_step`. `arriving`: the keys of requests whose prompts other workers
    compute, or which tiers load, which hold a batch slot and all blocks of the prompt.
    `link_free_s`: when the link ends its last transfer. `tiers`: those below the cache, if any.
    `ask_for_step` is called when they let the worker go on.
    """

    def __init__(
        self,
        name: str,
        number: int,
        info: EngineInfo,
        step_time: StepTime,
        cache: RunCache,
        gaps: LatencyHistogram,
        kv_events: KvEventBuffer | None,
        wake: Callable[[FastWorker, float], None],
        listener: WorkerListener,
    ) -> None:
        self.name, self.number = name, number
        self.gap_target_s = 0.0
        self._gap_count = self._slow_gaps = 0
        self.stopped = False
        self.info = info
        self.cache = cache
        self.steps, self.link_free_s = 1, 0.0
        self.preemptions = self.wakes = self.blocks_arrived = 0
        self.arriving = dict[FastRequest, int | None]()
        self.arrived: list[FastRequest] = []
        self.waiting: deque[FastRequest] = deque()
        self.prefilling: list[FastRequest] = []
        self.running: dict[FastRequest, None] = {}
        self._listener = listener
        self._time = step_time
        self._block_tokens = info.block_tokens
        self._gaps = gaps
        self.kv_events = kv_events
        self._wake = wake
        self.tiers: FastTiers | None = None
        self.ask_for_step: Callable[[], object] = lambda: None
        self._ends: list[tuple[int, int, FastRequest]] = []
        self._decoding = self._context = 0
        self._crossings = [0] * info.block_tokens
        self.leap: Leap | None = None
        self._leap_began_s, self.leap_steps = 0.0, 0
        self._sampled, self._for_others = list[FastRequest](), list[FastRequest]()
        self._late_starts: list[float] = []
        self._step_s = self._attention = self._began_s = 0.0
        self._budget = self._new_tokens = self._sequences = self._steps_now = 0
        self._counted_s = -1.0
        self.is_busy = False

    def add(self, request: FastRequest, now: float) -> None:
        """Queue a request."""
        request.worker = self.name
        self.waiting.append(request)
        self.end_leap(now)

    def stop(self, now: float) -> list[FastRequest]:
        """Stop at once, for good. Return the requests that were here, which keep the tokens that
        they have got, and prompts for other workers."""
        steps, last_s = self._count_steps(now), self._began_s
        if (leap := self.leap) is not None and (count := steps - self.steps):
            leap.count_gaps(self._gaps, count, self._decoding)
            last_s += leap.duration_s(count)
        self.wakes += 1
        self.steps, self.leap, self.is_busy, self.stopped = steps, None, False, True
        stopped = [*self.running, *self.arriving, *self.waiting]
        for request in stopped:
            done = steps - request.first_step + 1 if request.first_step else 0
            request.restart(request.recomputed + done, last_s)
        for requests in (self.running, self.arriving, self.waiting, self.prefilling, self.arrived):
            requests.clear()
        return stopped

    def cancel(self, request: FastRequest, now: float) -> None:
        """Forget a prompt that was for another worker, which has died."""
        if request in self.running:
            del self.running[request]
            self._remove_from_step(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.arriving:
            del self.arriving[request]
            self.arrived = [each for each in self.arrived if each is not request]
        self.release_prompt(request, now)

    def compute_arriving(self, request: FastRequest, now: float) -> None:
        """Compute a prompt here whose worker has died."""
        del self.arriving[request]
        self._release(request, request.computed)
        request.restart(request.recomputed, now)
        self.waiting.appendleft(request)
        self.end_leap(now)

    @property
    def load(self) -> int:
        """The number of requests and prompts for others."""
        return len(self.running) + len(self.arriving) + len(self.waiting)

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens that are not computed yet, of prompts that are computed here."""
        waiting = sum(each.length for each in self.waiting if not each.source)
        return waiting + sum(each.length - each.computed for each in self.prefilling)

    def report_load(self, now: float, transfer: float) -> Load:
        """Return the load as an engine reports it."""
        steps, cache = self._count_steps(now), self.cache
        blocks = self.info.num_blocks - cache.available
        gaps, slow_gaps = self._gap_count, self._slow_gaps
        if self.leap is not None and (ended := steps - self.steps):
            blocks += self._blocks_needed(self.steps + 1, ended)
            gaps += ended * self._decoding
            slow_gaps += self.leap.count_slow(ended, self.gap_target_s) * self._decoding
        return Load(
            running=len(self.running) + len(self.arriving),
            waiting=len(self.waiting),
            prefill_tokens=self.queued_tokens,
            active_blocks=blocks,
            total_blocks=self.info.num_blocks,
            steps=steps,
            arriving=len(self.arriving),
            gaps=gaps,
            slow_gaps=slow_gaps,
            transfer_bytes_per_s=transfer,
            tiers=() if self.tiers is None else self.tiers.report_load(),
            timing=() if self.tiers is None else self.tiers.timing,
        )

    @property
    def decoding(self) -> int:
        """The number of requests that decode."""
        return self._decoding

    def end_leap(self, now: float) -> None:
        """End a leap with the step that is being computed."""
        if self.leap is not None:
            steps = self.leap.steps_until(now - self._leap_began_s)
            if steps < self.leap_steps:
                self.leap_steps = steps
                self._wake(self, self._leap_began_s + self.leap.duration_s(steps))

    def emitted(self, request: FastRequest, now: float) -> int:
        """Return the tokens that a request has got by `now`."""
        if not request.first_step:
            return request.recomputed
        if now != self._counted_s:
            self._counted_s, self._steps_now = now, self._count_steps(now)
        return request.recomputed + self._steps_now - request.first_step + 1

    def _count_steps(self, now: float) -> int:
        """Return how many steps have ended by `now`."""
        if self.leap is None:
            return self.steps
        return self.steps + min(self.leap.steps_ended(now - self._leap_began_s), self.leap_steps)

    def begin(self, now: float) -> None:
        """Begin a step, or a leap of steps that only decode. Call while the worker is idle."""
        if self.arrived:
            self._run_arrived()
        if not (self.running or self.waiting):
            return
        preemptions, self._began_s = self.preemptions, now
        if self._decoding:
            self._grow()
        decoding, context = self._decoding, self._context
        self._budget = self.info.max_num_batched_tokens - decoding
        self._new_tokens, self._sequences, self._attention = 0, decoding, 0.0
        for request in self.prefilling.copy() if self.prefilling else ():
            if self._budget <= 0:
                break
            count = min(request.length - request.computed, self._budget)
            if not self._allocate(request, request.computed + count):
                break
            self._plan_chunk(request, count)
        if self.waiting and (preemptions == self.preemptions or not self._sequences):
            self._admit_waiting()
        self.is_busy = bool(self._sequences)
        if decoding and not self._new_tokens:
            self._begin_leap(now)
        elif self.is_busy:
            counts = self._new_tokens, self._sequences, decoding, context, self._attention
            self._step_s = self._time.step_s(*counts)
            self._wake(self, now + self._step_s)
        if self.tiers is not None:
            decodes = self.is_busy and not self._new_tokens
            self.tiers.on_planned(self.running, only_decodes=decodes)
            if self.is_busy:
                work = self._new_tokens, self._sequences, decoding, context, self._attention
                self.tiers.on_step(Counts(*work), self.next_step_s)

    def on_wake(self, now: float) -> None:
        """End the step or the leap, and give tokens and ends away. The worker is then idle."""
        self.is_busy, self._counted_s = False, -1.0
        if (leap := self.leap) is not None:
            self.leap = None
            if self._late_starts:
                self._count_late_starts(leap.first_s, now)
            else:
                steps = self.leap_steps
                leap.count_gaps(self._gaps, steps, self._decoding)
                if target_s := self.gap_target_s:
                    self._gap_count += steps * self._decoding
                    self._slow_gaps += leap.count_slow(steps, target_s) * self._decoding
            self._advance(self.leap_steps)
        elif self._decoding:
            self._count_late_starts(self._step_s, now)
            self._advance(1)
        else:
            self.steps += 1
        others = self._for_others
        if self._sampled:
            self._end_prompts(now)
        if others:
            self._for_others = []
            for request in others:
                request.sink(now)  # type: ignore[misc]
        ends, steps = self._ends, self.steps
        while ends and ends[0][0] <= steps:
            if (request := heappop(ends)[2]).end_step == steps:
                self._finish(request, now)
        if self.tiers is not None and not (self.running or self.waiting):
            self.tiers.on_planned(self.running)
        if self.kv_events is not None:
            self._publish()

    def _end_prompts(self, now: float) -> None:
        """Begin the answers of prompts that the last step has computed."""
        sampled, self._sampled = self._sampled, []
        for request in sampled:
            self.prefilling.remove(request)
            if request.sink is None:
                if request.recomputed:
                    self._gaps.add(now - request.last_token_s)
                self._start_answer(request)
                if request.awaited:
                    self._on_first_token(request, now)
            else:
                del self.running[request]

    def _publish(self) -> None:
        events = [] if self.kv_events is None else self.kv_events.drain()
        if self.tiers is not None:
            events += self.tiers.take_events()
        if events:
            self._listener.on_kv_events(self.name, events)

    def on_loaded(self, request: FastRequest, tokens: int, *, counts: bool) -> bool:
        if request not in self.arriving:
            return False
        held = len(request.held)
        self.on_blocks_arrived(request, tokens)
        for run, _ in request.held[held:]:
            run.hits = max(run.hits, 1)
        if counts:
            request.cached_tokens = min(tokens, request.prompt_tokens)
        return True

    def on_load_ended(self, request: FastRequest, now: float) -> None:
        if request not in self.arriving:
            return
        if request.source:
            self._listener.on_arrival(request, request.computed // self._block_tokens)
        else:
            self.arrived.append(request)
        self.end_leap(now)  # others may have waited for these blocks
        self.ask_for_step()

    def on_stored(self) -> None:
        if not self.stopped:
            self._publish()

    def on_blocks_arrived(self, request: FastRequest, tokens: int) -> None:
        """Cache the blocks of the first `tokens` of an arriving prompt."""
        request.computed = tokens
        self._register(request)
        self._publish()

    def on_first_token_arrived(self, request: FastRequest, cached_tokens: int, now: float) -> None:
        """Give away the first token of an arriving prompt, and the end if the answer has one."""
        if request.recomputed:
            self._gaps.add(now - request.last_token_s)
        else:
            request.cached_tokens = cached_tokens
        request.recomputed += 1
        request.last_token_s = now
        self._on_first_token(request, now)
        if request.recomputed == request.output_tokens:
            del self.arriving[request]
            self._release(request, request.computed)
            request.end_s = now
            self._listener.on_finished(request)

    def end_arrival(self, request: FastRequest, now: float) -> None:
        """Let a request run whose blocks are all here."""
        request.source = ""
        self.arriving[request] = None  # the prompt is cached
        self.arrived.append(request)
        self.end_leap(now)

    def release_prompt(self, request: FastRequest, now: float) -> None:
        """Release the blocks of a prompt that was computed for another worker."""
        self._release(request, request.computed)
        self.end_leap(now)

    def _run_arrived(self) -> None:
        for request in self.arrived:
            del self.arriving[request]
            self.running[request] = None
            if request.computed < request.length:
                self.prefilling.append(request)
                continue
            self._late_starts.append(request.last_token_s)
            request.recomputed -= 1
            self._start_answer(request)
        self.arrived.clear()

    def _on_first_token(self, request: FastRequest, now: float) -> None:
        request.awaited = False
        request.first_token_s = request.first_token_s or now
        self._listener.on_first_token(request)

    def _count_late_starts(self, step_s: float, now: float) -> None:
        """Count the gaps of one step. First tokens of arrived requests came before it began."""
        late, self._late_starts = self._late_starts, []
        if target_s := self.gap_target_s:
            self._gap_count += self._decoding
            self._slow_gaps += (self._decoding - len(late)) * (step_s > target_s)
            self._slow_gaps += sum(now - token_s > target_s for token_s in late)
        if count := self._decoding - len(late):
            self._gaps.add(step_s, count)
        for token_s in late:
            self._gaps.add(now - token_s)

    def _begin_leap(self, now: float) -> None:
        steps = self._ends[0][0] - self.steps
        if self._late_starts:
            steps = 1
        elif steps > 1:  # the blocks of the first step are allocated
            steps = 1 + self._steps_with_blocks(steps - 1)
        self.leap = self._time.leap(self._decoding, self._context)
        self._leap_began_s, self.leap_steps = now, steps
        self._wake(self, now + self.leap.duration_s(steps))

    @property
    def next_step_s(self) -> float:
        """The time of the first step that has begun."""
        return self._step_s if self.leap is None else self.leap.first_s

    def align(self, leap: Leap, steps: int, now: float) -> None:
        """Take the times of these steps instead, of which the first has just begun."""
        if self.leap is None:
            self._step_s = leap.first_s
        else:
            self.leap, self.leap_steps = leap, steps
        self._wake(self, now + leap.duration_s(steps))

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
        if self._decoding * (steps // self._block_tokens + 1) <= available:
            return steps
        if self._blocks_needed(first, steps) <= available:
            return steps
        needed = partial(self._blocks_needed, first)
        return bisect_right(range(steps), available, key=needed) - 1

    def _grow(self) -> None:
        """Allocate the blocks of the next decode step, preempting the last sequences."""
        need = self._crossings[self.steps % self._block_tokens]
        while need > self.cache.available and len(self.running) > 1:
            self._preempt(next(reversed(self.running)))
            need = self._blocks_needed(self.steps, 1)
        if need:
            self.cache.allocate(min(need, self.cache.available))

    def _admit_waiting(self) -> None:
        """Admit waiting requests in order while tokens, batch slots and blocks are left."""
        waiting, skipped, tiers = self.waiting, [], self.tiers
        while waiting and len(self.running) + len(self.arriving) < self.info.max_num_seqs:
            request = waiting[0]
            key = request.prompt_key if request.source else None
            waits = key is not None and key in self.arriving.values()
            if waits or (tiers is not None and tiers.is_loading(request)):
                skipped.append(waiting.popleft())  # the blocks will be cached
                continue
            if not (self._budget > 0 or request.source or tiers) or not self._admit(request):
                break
            waiting.popleft()
            if request in self.running:
                count = min(request.length - request.computed, self._budget)
                self._allocate(
                    request, request.length if request.sink else request.computed + count
                )
                self._plan_chunk(request, count)
        if skipped:
            waiting.extendleft(reversed(skipped))

    def _admit(self, request: FastRequest) -> bool:
        """Give a waiting request its cached runs if all of its tokens fit into blocks now."""
        cache, size = self.cache, self._block_tokens
        full = (request.length - 1) // size
        cached, unused, matched = 0, 0, NOTHING
        if units := min(request.units, -(-full // cache.unit)):
            matched = cache.match(request.keys, 0, units)
            if matched:
                cached, unused = cache.count(matched)
        blocks = min(full, cached)
        need = -(-request.length // size) - blocks
        if need > cache.available - unused:
            return False
        loads: Sequence[UnitLoad] = ()
        if 0 < full == blocks:
            request.source = ""
        elif self.tiers is not None:
            backlog = self.queued_tokens + self._new_tokens
            loads = self.tiers.find_loads(request, blocks, full, backlog)
        arrives = bool(request.source or loads)
        if not arrives and self._budget <= 0:
            return False
        if matched:
            request.held = cache.take(matched)
            request.held_units = sum([units for _, units in matched])
            request.run_blocks, request.own_blocks = cached, blocks - cached
        request.computed = blocks * size
        is_first, request.admitted = not request.admitted, True
        if is_first:
            request.cached_tokens = request.computed
        if arrives:
            self._await_blocks(request, need, loads, is_first=is_first)
            return True
        if self.tiers is not None:
            self.tiers.on_hits(request, blocks)
        self.running[request] = None
        self.prefilling.append(request)
        return True

    def _await_blocks(
        self, request: FastRequest, need: int, loads: Sequence[UnitLoad], *, is_first: bool
    ) -> None:
        """Let a request hold `need` blocks more, which others fill."""
        self.cache.allocate(need)
        request.own_blocks += need
        shares = self.cache.enabled and request.output_tokens > 1
        self.arriving[request] = request.prompt_key if shares else None
        if loads and self.tiers is not None:
            self.tiers.load(request, loads, counts=is_first)
        else:
            self._listener.on_arrival(request, request.computed // self._block_tokens)

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
        self._attention += count * (request.computed + count / 2)
        self._budget -= count
        self._new_tokens += count
        self._sequences += 1
        request.computed += count
        if request.computed == request.length:
            self._sampled.append(request)
        if request.sink is not None:
            self._for_others.append(request)
        if request.units:
            self._register(request)

    def _register(self, request: FastRequest) -> None:
        """Cache the full blocks of a prompt up to the position `computed`."""
        cache, at = self.cache, request.held_units
        full = min(request.computed // self._block_tokens, request.named_blocks)
        units = request.units if full == request.named_blocks else full // cache.unit
        blocks = min(units * cache.unit, full) - request.run_blocks
        if blocks > 0 and units >= at:
            cache.register(request.held, request.keys, at, units, blocks)
            request.held_units = units
            request.run_blocks += blocks
            request.own_blocks -= blocks

    def _start_answer(self, request: FastRequest) -> None:
        """Count the token that the last step sampled after the prompt."""
        self._decoding += 1
        request.length += 1
        request.first_step = self.steps
        request.end_step = self.steps + request.output_tokens - request.recomputed - 1
        self._context += request.length
        self._crossings[(self.steps + 1 - request.length) % self._block_tokens] += 1
        heappush(self._ends, (request.end_step, request.row, request))

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
            request.last_token_s = self._began_s
        else:
            self._remove_from_step(request)
            self._release(request, request.computed)
        request.computed = 0
        self.waiting.appendleft(request)

    def _remove_from_step(self, request: FastRequest) -> None:
        """Take a prompt out of the step that is planned or computed."""
        for prompts in (self.prefilling, self._sampled, self._for_others):
            if request in prompts:
                prompts.remove(request)

    def _release(self, request: FastRequest, computed: int) -> None:
        """Release the blocks of a sequence. Full blocks that no other finds stay cached, too."""
        full = max(0, computed // self._block_tokens - request.run_blocks)
        blocks = request.own_blocks
        if request.first_step:
            blocks = -(-computed // self._block_tokens) - request.run_blocks
        self.cache.release(request.held, full, blocks - full)
        request.held = []
        request.held_units = request.run_blocks = request.own_blocks = 0
