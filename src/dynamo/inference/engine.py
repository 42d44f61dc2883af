"""`BatchedEngine`: the loop of every local engine, which schedules, computes and delivers steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, Unsupported, WorkerFailed
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    KvEvent,
    Load,
    Started,
    TokenLogprobs,
)
from dynamo.inference.arrivals import EngineArrivals
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.eviction import EvictionPolicy
from dynamo.inference.fast_forward import SimulationHooks
from dynamo.inference.kv_source import FirstToken, KvSource, PrefillSink
from dynamo.inference.model_runner import ModelRunner, StepPlan, StepResult
from dynamo.inference.prefill_calls import PrefillCall
from dynamo.inference.sequence import (
    EngineSequence,
    ForkedContent,
    RequestState,
    TokenContent,
)
from dynamo.inference.step_scheduler import HitsFrom, StepScheduler

log = logging.getLogger(__name__)
KvEventListener = Callable[[Sequence[KvEvent]], None]


class EngineCounters(msgspec.Struct):
    """Totals since the engine's start, for metrics."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class BatchedEngine(Engine):
    """An engine with continuous batching over a block pool. A `ModelRunner` computes its steps.
    `kv_source` supplies the KV of prompts that another worker computes; None: no such worker."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        eos_token_ids: Iterable[int] = (),
        hits_from: HitsFrom = "computed",
        prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
        simulation: SimulationHooks | None = None,
    ) -> None:
        self.runner = runner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._hits_from: HitsFrom = hits_from
        self._prefix_caching = prefix_caching
        self._eviction = eviction
        self._simulation = simulation
        self._tasks = BackgroundTasks(self._on_loop_failed)
        self._work_arrived = asyncio.Event()
        self._retried_sequences: set[EngineSequence] = set()
        self._sequences: dict[Reply, EngineSequence] = {}
        self._kv_event_listeners: list[KvEventListener] = []
        self._failure_listeners: list[Callable[[], None]] = []
        self.prefill_calls: dict[PrefillCall, None] = {}
        self.failure: WorkerFailed | None = WorkerFailed("the engine has not started")
        self.counters = EngineCounters()
        self.arrivals = EngineArrivals(self)
        self.kv_source: KvSource | None = None

    async def start(self) -> EngineInfo:
        info = await self.runner.start()
        region = self.runner.region
        self._pool = BlockPool(
            info.num_blocks,
            info.block_tokens,
            eviction=self._eviction,
            prefix_caching=self._prefix_caching,
            generations=None if region is None else region.generations,
        )
        self.scheduler = StepScheduler(self._pool, info, hits_from=self._hits_from)
        if self._simulation is not None:
            self._simulation.fast_forward.attach(self.scheduler, self._deliver_skipped_steps)
        self._vocab_size = info.vocab_size
        self.failure = None
        self._tasks.start(self._run_steps(), "engine steps")
        return info

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        sequence = self._make_sequence(request)
        if request.prefill:
            self._disaggregate(sequence, reply)
        completion = asyncio.get_running_loop().create_future()
        sequence.request_state = RequestState(reply, completion, context)
        self._interrupt_fast_forward()
        self.scheduler.add(sequence)
        self._sequences[reply] = sequence
        if context.attempt:
            self._retried_sequences.add(sequence)
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.prompt_tokens
        self._work_arrived.set()
        try:
            await completion
        finally:
            self._sequences.pop(reply, None)
            self._retried_sequences.discard(sequence)
            if not sequence.ended:
                self._interrupt_fast_forward()
                self.scheduler.remove(sequence)
            if sequence.source is not None:
                await self.arrivals.end(sequence)

    async def prefill(
        self, request: GenerateRequest, context: Context, have_blocks: int, sink: PrefillSink
    ) -> None:
        """Compute the prompt of `request` for another worker, which has `have_blocks` of it.

        `sink` learns of each full block after the step that computed it, of the partial last block,
        and of the first token. The blocks stay referenced until this call is cancelled, which frees
        them before it returns; the call does not return by itself. Raises `Unsupported` if peers
        cannot read this engine's memory, and the errors of `generate`.
        """
        if self.runner.region is None:
            raise Unsupported("this worker computes no prompts for others: it exposes no KV memory")
        call = PrefillCall(self, self.runner.region, sink, have_blocks)
        try:
            await self.generate(request, context, call)
        finally:
            self.prefill_calls.pop(call, None)
            self._work_arrived.set()

    def has_request(self, reply: Reply) -> bool:
        sequence = self._sequences.get(reply)
        if sequence is None or sequence.request_state.completion.done():
            return True
        if sequence.prefill_only:
            return not sequence.ended
        return self.scheduler.has(sequence)

    def report_load(self) -> Load:
        if self.failure is not None:
            return Load()
        self.catch_up()
        scheduler, pool = self.scheduler, self._pool
        return Load(
            running=len(scheduler.running) + len(scheduler.arriving),
            waiting=len(scheduler.waiting),
            prefill_tokens=scheduler.prefill_tokens(),
            active_blocks=pool.active,
            total_blocks=pool.num_blocks,
            cached_blocks=pool.cached,
            steps=self.counters.steps,
            arriving=len(scheduler.arriving),
        )

    async def stop(self) -> None:
        self._fail_all(WorkerFailed("the engine was stopped"))
        await self.arrivals.close()
        await self._tasks.close()
        await self.runner.stop()

    def on_kv_events(self, listener: KvEventListener) -> None:
        self._kv_event_listeners.append(listener)

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        return self._pool.dump_events()

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Call `listener` if the engine's loop fails. Every later request fails, too."""
        self._failure_listeners.append(listener)

    def clear_prefix_cache(self) -> int:
        """Empty the prefix cache and return how many blocks it held."""
        count = self._pool.clear()
        self._publish_kv_events()
        return count

    def catch_up(self) -> None:
        """Deliver every token that is computed by now, if virtual time skips steps."""
        if self._simulation is not None:
            self._simulation.fast_forward.catch_up()

    def _interrupt_fast_forward(self) -> None:
        if self._simulation is not None:
            self._simulation.fast_forward.interrupt()

    def deliver_first_token(self, sequence: EngineSequence, first: FirstToken) -> None:
        """Add the first token to an arriving sequence and send it to the reply."""
        self.catch_up()
        sequence.cached_tokens = first.cached_tokens
        self.scheduler.append_first_token(sequence, first.token)
        try:
            self._deliver_token(sequence, first.token, first.logprobs)
        except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
            self._end_sequence(sequence, error)

    def on_blocks_arrived(self, sequence: EngineSequence, first: int, tokens: int) -> None:
        """Take over blocks from `first` up to position `tokens` of an arriving sequence."""
        self.catch_up()
        self.runner.import_blocks(sequence, first, -(-tokens // self._pool.block_tokens))
        self.scheduler.on_arrived(sequence, tokens)
        self._publish_kv_events()

    def on_arrival_ended(self, sequence: EngineSequence) -> None:
        """Let an arriving sequence run, or release its blocks if it has ended."""
        self._interrupt_fast_forward()
        self.scheduler.end_arrival(sequence)
        self._work_arrived.set()

    def _disaggregate(self, sequence: EngineSequence, reply: Reply) -> None:
        """Let a sequence wait for the KV of its prompt, or compute that KV for another worker."""
        if not isinstance(reply, PrefillCall):
            sequence.source = self.kv_source
            return
        sequence.prefill_only = True
        if not sequence.min_length > sequence.prompt_tokens:
            sequence.stop_ids = frozenset()  # the other worker ends the answer
        reply.sequence = sequence
        self.prefill_calls[reply] = None

    def _make_sequence(self, request: GenerateRequest) -> EngineSequence:
        if self._simulation is not None and self._simulation.resolve_request is not None:
            return EngineSequence(*self._simulation.resolve_request(request), request=request)
        group = request.group
        if group is None or not group.covers(request):
            content = self._make_content(request)
        else:
            if group.engine_prompt is None:
                group.engine_prompt = self._make_content(request)
            content = ForkedContent(group.engine_prompt)
        stops = request.stops
        if stops.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        sequence = EngineSequence(
            content,
            len(content.tokens),
            stops.max_tokens,
            priority=request.priority,
            request=request,
        )
        sequence.min_length += stops.min_tokens
        stop_ids = frozenset(stops.stop_token_ids)
        sequence.stop_ids = stop_ids if stops.ignore_eos else stop_ids | self._eos_token_ids
        return sequence

    def _make_content(self, request: GenerateRequest) -> TokenContent:
        content = TokenContent(request.token_ids, self._pool.block_tokens, request.salt)
        largest = max(content.tokens, default=0)
        if self._vocab_size and largest >= self._vocab_size:
            raise InvalidRequest(
                f"token id {largest} is not in the vocabulary of {self._vocab_size}",
                param="prompt",
            )
        return content

    async def _run_steps(self) -> None:
        while True:
            plan = self.scheduler.schedule()
            if self.scheduler.new_arrivals:
                self.arrivals.start_new()
            if plan is None:
                await self._wait_for_work()
                continue
            if self._retried_sequences:
                await self._begin_retried(plan)
            result = await self._compute_step(plan)
            if result is not None:
                self.scheduler.complete(plan, result.tokens)
                for call in self.prefill_calls:
                    call.report_blocks()
                self._deliver_step(plan, result)
            self._publish_kv_events()
            if self._simulation is not None:
                await self._simulation.fast_forward.skip_steady_steps(plan)

    async def _wait_for_work(self) -> None:
        self._work_arrived.clear()
        await self._work_arrived.wait()
        if self._simulation is not None:
            await self._simulation.wait_until_quiescent()

    async def _begin_retried(self, plan: StepPlan) -> None:
        """Begin the replies of retried requests before their first step is computed. If that step
        kills the worker, the router knows which requests were in the batch."""
        admitted = self._retried_sequences.intersection(chunk.sequence for chunk in plan.chunks)
        for sequence in admitted:
            try:
                self._begin_reply(sequence)
            except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
                self._end_sequence(sequence, error)
        self._retried_sequences -= admitted
        await asyncio.sleep(0)

    def _begin_reply(self, sequence: EngineSequence) -> None:
        state = sequence.request_state
        if not state.reply_begun:
            state.reply_begun = True
            state.reply.begin(
                Started(cached_tokens=sequence.cached_tokens, prompt_tokens=sequence.prompt_tokens)
            )

    async def _compute_step(self, plan: StepPlan) -> StepResult | None:
        self.counters.steps += 1
        try:
            return await self.runner.step(plan)
        except Exception as error:
            log.exception("a step failed", extra={"fields": {"sequences": len(plan.chunks)}})
            for chunk in plan.chunks:
                self.scheduler.remove(chunk.sequence)
                chunk.sequence.request_state.complete(
                    WorkerFailed(f"the engine failed in a step: {error}")
                )
            return None

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
                    self._end_sequence(sequence, error)
            index += 1
        self.counters.generated_tokens += index

    def _deliver_skipped_steps(self, steps: int, sampled: Sequence[Sequence[int]]) -> None:
        """Deliver the tokens of `steps` skipped steps, a list for each running sequence."""
        running = self.scheduler.running.copy()
        for sequence, ids in zip(running, sampled, strict=True):
            if not sequence.request_state.reply.tokens(ids):
                self._end_sequence(sequence)
        self.counters.steps += steps
        self.counters.generated_tokens += steps * len(running)
        self._publish_kv_events()

    def _deliver_token(
        self, sequence: EngineSequence, token: int, extra: TokenLogprobs | None
    ) -> None:
        """Send one token to its reply and end the sequence if the answer is complete."""
        reply = sequence.request_state.reply
        output_tokens = sequence.length - sequence.prompt_tokens
        if output_tokens == 1:
            self.counters.cached_tokens += sequence.cached_tokens
            self._begin_reply(sequence)
        if token in sequence.stop_ids and sequence.length > sequence.min_length:
            reply.finish(Finish("stop", output_tokens, token))
            self._end_sequence(sequence)
        elif not reply.tokens((token,), None if extra is None else (extra,)):
            self._end_sequence(sequence)
        elif sequence.length >= sequence.max_length:
            reply.finish(Finish("length", output_tokens))
            self._end_sequence(sequence)

    def _end_sequence(self, sequence: EngineSequence, error: BaseException | None = None) -> None:
        self.scheduler.remove(sequence)
        sequence.request_state.complete(error)

    def _publish_kv_events(self) -> None:
        events = self._pool.take_events()
        if events:
            for listener in self._kv_event_listeners:
                listener(events)

    def _on_loop_failed(self, error: BaseException) -> None:
        log.error("the engine's loop failed", exc_info=error)
        self._fail_all(WorkerFailed("the engine has failed"))
        for listener in self._failure_listeners:
            listener()

    def _fail_all(self, failure: WorkerFailed) -> None:
        started = self.failure is None
        self.failure = failure
        if started:
            scheduler = self.scheduler
            held = [call.sequence for call in self.prefill_calls]
            for sequence in [*scheduler.running, *scheduler.waiting, *scheduler.arriving, *held]:
                self._end_sequence(sequence, WorkerFailed(failure.message))
