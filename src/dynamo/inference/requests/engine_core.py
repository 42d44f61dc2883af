"""`EngineCore`: what the parts of a batched engine share, and the delivery of tokens to replies."""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import Callable, Sequence
from typing import Any

from dynamo.core.errors import Unsupported
from dynamo.core.reply import Engine, KvEventListener, Reply
from dynamo.core.timing.learner import TimingLearner
from dynamo.core.timing.worker_times import StepGaps
from dynamo.core.values import EngineTotals, Finish, FinishReason, Started, TokenLogprobs
from dynamo.inference.engine_tiers import EngineTiers
from dynamo.inference.fast_forward import RealTime
from dynamo.inference.kv_source import FirstToken
from dynamo.inference.model_runner import ModelRunner, StepPlan, StepResult
from dynamo.inference.sequence import EngineSequence
from dynamo.inference.step_scheduler import StepScheduler
from dynamo.models.grammar.matcher import GrammarCompiler


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


class EngineCore(Engine):
    """The state of an engine that arrivals, prefill calls and tiers read and change. `scheduler`
    exists once the engine has started. `time` skips steps where time is virtual."""

    scheduler: StepScheduler

    def __init__(self, runner: ModelRunner, time: RealTime) -> None:
        self.runner = runner
        self.tiers = EngineTiers()
        self.counters = EngineTotals()
        self.token_gaps = TokenGaps()
        self.step_gaps = StepGaps()
        self.timing_learner: TimingLearner = TimingLearner()
        self._time = time
        self._work_arrived = asyncio.Event()
        self._kv_event_listeners: list[KvEventListener] = []

    def on_kv_events(self, listener: KvEventListener) -> None:
        self._kv_event_listeners.append(listener)

    def publish_kv_events(self) -> None:
        """Publish the changes of the prefix cache and of its tiers since the last call."""
        events = self.scheduler.pool.take_events() + self.tiers.take_events()
        if events:
            for listener in self._kv_event_listeners:
                listener(events)

    def catch_up(self) -> None:
        """Deliver every token that is computed by now, if virtual time skips steps."""
        self._time.catch_up()

    def replan(self) -> None:
        """Plan a step next, because the batch can change."""
        self._time.interrupt()
        self._work_arrived.set()

    def note_times(self) -> None:
        """Note which sequences a plan has taken up or preempted."""
        changes, now = self.scheduler.changes, asyncio.get_running_loop().time()
        for sequence in changes:
            times = sequence.request_state.times
            if sequence.blocks:
                times.on_taken(now, sequence.length - sequence.computed_tokens)
            else:
                times.paused_s = now
        changes.clear()

    def end_sequence(self, sequence: EngineSequence, error: BaseException | None = None) -> None:
        """End the request of a sequence, with `error` if there is one."""
        self.scheduler.remove(sequence)
        sequence.request_state.complete(error)

    def on_blocks_arrived(self, sequence: EngineSequence, first: int, tokens: int) -> None:
        """Take over blocks from `first` up to position `tokens` of an arriving sequence."""
        self.catch_up()
        self.runner.import_blocks(sequence, first, -(-tokens // self.scheduler.pool.block_tokens))
        self.scheduler.on_arrived(sequence, tokens)
        if self.scheduler.waiting:  # a sequence with these blocks may be admitted now
            self.replan()
        self.publish_kv_events()

    def on_arrival_ended(self, sequence: EngineSequence) -> None:
        """Let an arriving sequence run, or release its blocks if it has ended."""
        self.replan()
        self.scheduler.end_arrival(sequence)

    def deliver_first_token(self, sequence: EngineSequence, first: FirstToken) -> None:
        """Add the first token of an answer, which another worker has sampled, to an arriving
        sequence and send it to the reply."""
        self.catch_up()
        sequence.cached_tokens = first.cached_tokens
        times = sequence.request_state.times
        times.peer_queue_s, times.peer_prefill_s = first.queue_s, first.prefill_s
        self.scheduler.append_first_token(sequence, first.token)
        self.token_gaps.on_first_token(sequence)
        try:
            self._deliver_token(sequence, first.token, first.logprobs)
        except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
            self.end_sequence(sequence, error)

    def _deliver_step(self, plan: StepPlan, result: StepResult) -> None:
        index = 0
        tokens, logprobs = result.tokens, result.logprobs
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            if not sequence.ended:
                extra = logprobs[index] if logprobs is not None else None
                try:
                    self._deliver_token(sequence, tokens[index], extra)
                except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
                    self.end_sequence(sequence, error)
            index += 1
        self.counters.generated_tokens += index

    def _deliver_skipped_steps(self, ends: Any, sampled: Sequence[Sequence[int]]) -> None:
        """Deliver the tokens of skipped steps, which ended at the times in the array `ends`: a list
        for each running sequence."""
        running = self.scheduler.running.copy()
        for sequence, ids in zip(running, sampled, strict=True):
            if not sequence.request_state.reply.tokens(ids):
                self.end_sequence(sequence)
        self.counters.steps += len(ends)
        self.step_gaps.on_steps(float(ends[-1]), len(running), len(ends))
        self.counters.generated_tokens += len(ends) * len(running)
        if self.token_gaps.target_s:
            self.token_gaps.on_steps(ends.tolist(), len(running))
        self.publish_kv_events()

    def _deliver_token(
        self, sequence: EngineSequence, token: int, extra: TokenLogprobs | None
    ) -> None:
        """Send one token to its reply and end the sequence if the answer is complete."""
        reply = sequence.request_state.reply
        output_tokens = sequence.length - sequence.prompt_tokens
        if output_tokens == 1:
            self.counters.cached_tokens += sequence.cached_tokens
            begin_reply(sequence, self.step_gaps)
        grammar = sequence.grammar
        if grammar is not None and not sequence.feed_grammar():
            self.end_sequence(sequence, grammar.failure())
        elif token in sequence.stop_ids and sequence.length > sequence.min_length:
            self._finish(sequence, "stop", token)
            self.end_sequence(sequence)
        elif not reply.tokens((token,), None if extra is None else (extra,)):
            self.end_sequence(sequence)
        elif grammar is not None and grammar.finished and not sequence.prefill_only:
            self._finish(sequence, "stop")
            self.end_sequence(sequence)
        elif sequence.length >= sequence.max_length:
            self._finish(sequence, "length")
            self.end_sequence(sequence)

    def _finish(
        self, sequence: EngineSequence, reason: FinishReason, stop_token: int | None = None
    ) -> None:
        state = sequence.request_state
        now = asyncio.get_running_loop().time()
        times = state.times.finish(now, self.step_gaps, sequence.preemptions)
        state.reply.finish(sequence.make_finish(reason, stop_token, times))


def begin_reply(sequence: EngineSequence, gaps: StepGaps | None = None) -> None:
    """Begin the reply of a sequence; a second call changes nothing. `gaps`: those of the steps up
    to its first token; None: it has none yet."""
    state = sequence.request_state
    times = None if gaps is None else state.times.begin(asyncio.get_running_loop().time(), gaps)
    if not state.reply_begun:
        state.reply_begun = True
        cached, prompt = sequence.cached_tokens, sequence.prompt_tokens
        state.reply.begin(Started(cached_tokens=cached, prompt_tokens=prompt, times=times))


class RetriedRequests(set[EngineSequence]):
    """The sequences of retried requests that no step has computed yet."""

    async def begin(self, plan: StepPlan, end: Callable[[EngineSequence, Exception], None]) -> None:
        """Begin the replies of those in `plan` before the step is computed. If that step kills the
        worker, the router knows which requests were in the batch. `end` ends one that fails."""
        admitted = self.intersection(chunk.sequence for chunk in plan.chunks)
        for sequence in admitted:
            try:
                begin_reply(sequence)
            except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
                end(sequence, error)
        self.difference_update(admitted)
        await asyncio.sleep(0)


async def open_grammar(
    grammars: GrammarCompiler | None, sequence: EngineSequence, reply: Reply
) -> bool:
    """Give a sequence the grammar that its request names, fed with the tokens of earlier attempts.

    Returns False if these have completed the answer, which then ends here. Raises `Unsupported`
    without `grammars`, and `InvalidRequest` for a grammar that cannot be enforced.
    """
    request = sequence.request
    if grammars is None or request is None or request.structured is None:
        raise Unsupported("this engine cannot enforce a structured output")
    grammar = grammars.copy_compiled(request.structured)
    if grammar is None:
        grammar = await asyncio.to_thread(grammars.open_matcher, request.structured)
    sequence.grammar = grammar
    if not sequence.feed_grammar():
        raise grammar.failure()
    if grammar.finished:
        reply.begin(Started(prompt_tokens=sequence.prompt_tokens))
        reply.finish(Finish("stop"))
    return not grammar.finished
