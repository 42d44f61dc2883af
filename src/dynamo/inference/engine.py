"""`BatchedEngine`: the loop of every local engine, which schedules, computes and delivers steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import Unsupported, WorkerFailed
from dynamo.core.features import GRAMMAR_FEATURES
from dynamo.core.reply import Engine, KvEventListener, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    EngineTotals,
    GenerateRequest,
    KvEvent,
    Load,
    TokenLogprobs,
)
from dynamo.inference.arrivals import EngineArrivals
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.eviction import EvictionPolicy
from dynamo.inference.fast_forward import SimulationHooks
from dynamo.inference.kv_source import FirstToken, KvSource, PrefillSink
from dynamo.inference.model_runner import ModelRunner, StepPlan, StepResult
from dynamo.inference.prefill_calls import PrefillCall, report_blocks
from dynamo.inference.requests.constrained import open_grammar
from dynamo.inference.requests.retried import RetriedRequests, begin_reply
from dynamo.inference.sequence import EngineSequence, RequestState, SequenceFactory
from dynamo.inference.step_scheduler import HitsFrom, StepScheduler
from dynamo.inference.step_times import PrefillSpeed, TokenGaps
from dynamo.inference.tiers.kv_tiers import KvTiers, OpenTiers
from dynamo.models.grammar.matcher import GrammarCompiler

log = logging.getLogger(__name__)


class BatchedEngine(Engine):
    """An engine with continuous batching over a block pool. A `ModelRunner` computes its steps.
    `kv_source` supplies the KV of prompts that another worker computes; None: no such worker.
    `grammars`: enforces forms of answers; None: it cannot."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        eos_token_ids: Iterable[int] = (),
        hits_from: HitsFrom = "computed",
        prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
        simulation: SimulationHooks | None = None,
        open_tiers: OpenTiers | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.runner = runner
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._hits_from: HitsFrom = hits_from
        self._prefix_caching = prefix_caching
        self._eviction = eviction
        self._simulation = simulation
        self._open_tiers = open_tiers
        self._tasks = BackgroundTasks(self._on_loop_failed)
        self._work_arrived = asyncio.Event()
        self._retried_requests = RetriedRequests()
        self._sequences: dict[Reply, EngineSequence] = {}
        self._kv_event_listeners: list[KvEventListener] = []
        self._failure_listeners: list[Callable[[], None]] = []
        self.prefill_calls: dict[PrefillCall, None] = {}
        self.failure: WorkerFailed | None = WorkerFailed("the engine has not started")
        self.counters = EngineTotals()
        self.token_gaps = TokenGaps()
        self.prefill_speed = PrefillSpeed()
        self.arrivals = EngineArrivals(self)
        self.kv_source: KvSource | None = None
        self.tiers: KvTiers | None = None

    async def start(self) -> EngineInfo:
        info = await self.runner.start()
        if self._grammars is not None:
            info = replace(info, features=(*info.features, *GRAMMAR_FEATURES))
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
        if self._open_tiers is not None and self._prefix_caching:
            self.tiers = await KvTiers.open(self, self._open_tiers, info, self._pool)
            self.scheduler.tiers = self.tiers
        self._sequence_factory = SequenceFactory(
            info.block_tokens,
            info.vocab_size,
            self._eos_token_ids,
            None if self._simulation is None else self._simulation.resolve_request,
            has_tiers=self.tiers is not None,
        )
        self.failure = None
        self._tasks.start(self._run_steps(), "engine steps")
        return info

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        sequence = self._sequence_factory.make(request)
        if request.structured is not None:
            if not await open_grammar(self._grammars, sequence, reply):
                return
            if self.failure is not None:
                raise WorkerFailed(self.failure.message)
        if (request.prefill or request.kv_from) and not sequence.wants_prompt_logprobs:
            self._disaggregate(sequence, reply)
        if request.itl_slo_ms:
            self.token_gaps.target_s = request.itl_slo_ms * 1e-3
        completion = asyncio.get_running_loop().create_future()
        sequence.request_state = RequestState(reply, completion, context)
        self.replan()
        self.scheduler.add(sequence)
        self._sequences[reply] = sequence
        if context.attempt:
            self._retried_requests.add(sequence)
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.prompt_tokens
        try:
            await completion
        finally:
            self._sequences.pop(reply, None)
            self._retried_requests.discard(sequence)
            if not sequence.ended:
                self.replan()
                self.scheduler.remove(sequence)
            if sequence.sources:
                await self.arrivals.end(sequence)

    async def prefill(
        self, request: GenerateRequest, context: Context, have_blocks: int, sink: PrefillSink
    ) -> None:
        """Compute the prompt of `request` for another worker, which has `have_blocks` of it.

        `sink` learns of each full block after its step, of the partial last block, and of the first
        token. The blocks stay referenced until this call is cancelled, which frees them; the call
        does not return by itself. Raises `Unsupported` without memory that peers can read.
        """
        if self.runner.region is None:
            raise Unsupported("this worker computes no prompts for others: it exposes no KV memory")
        sink.on_queued(self.scheduler.prefill_tokens())
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
            gaps=self.token_gaps.gaps,
            slow_gaps=self.token_gaps.slow_gaps,
            transfer_bytes_per_s=0.0 if self.kv_source is None else self.kv_source.bytes_per_s,
            tiers=() if self.tiers is None else self.tiers.report_load(),
        )

    async def stop(self) -> None:
        self._fail_all(WorkerFailed("the engine was stopped"))
        await self.arrivals.close()
        await self._tasks.close()
        if self.tiers is not None:
            await self.tiers.close()
        await self.runner.stop()

    def on_kv_events(self, listener: KvEventListener) -> None:
        self._kv_event_listeners.append(listener)

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        events: Sequence[KvEvent] = self._pool.dump_events()
        return events if self.tiers is None else [*events, *self.tiers.snapshot_events()]

    def on_failure(self, listener: Callable[[], None]) -> None:
        self._failure_listeners.append(listener)

    def totals(self) -> EngineTotals:
        self.counters.preemptions = self.scheduler.preemptions
        self.counters.evicted_blocks = self._pool.evictions
        return self.counters

    async def clear_blocks(self) -> int:
        return self.clear_prefix_cache()

    def clear_prefix_cache(self) -> int:
        """Empty the prefix cache with its tiers, and return how many blocks these held."""
        count = self._pool.clear()
        if self.tiers is not None:
            count += self.tiers.clear()
            self.tiers.take_events()  # the event of the pool is for all tiers
        self.publish_kv_events()
        return count

    def catch_up(self) -> None:
        """Deliver every token that is computed by now, if virtual time skips steps."""
        if self._simulation is not None:
            self._simulation.fast_forward.catch_up()

    def replan(self) -> None:
        """Plan a step next, because the batch can change."""
        if self._simulation is not None:
            self._simulation.fast_forward.interrupt()
        self._work_arrived.set()

    def deliver_first_token(self, sequence: EngineSequence, first: FirstToken) -> None:
        self.catch_up()
        sequence.cached_tokens = first.cached_tokens
        self.scheduler.append_first_token(sequence, first.token)
        self.token_gaps.on_first_token(sequence)
        try:
            self._deliver_token(sequence, first.token, first.logprobs)
        except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
            self.end_sequence(sequence, error)

    def on_blocks_arrived(self, sequence: EngineSequence, first: int, tokens: int) -> None:
        """Take over blocks from `first` up to position `tokens` of an arriving sequence."""
        self.catch_up()
        self.runner.import_blocks(sequence, first, -(-tokens // self._pool.block_tokens))
        self.scheduler.on_arrived(sequence, tokens)
        if self.scheduler.waiting:  # a sequence with these blocks may be admitted now
            self.replan()
        self.publish_kv_events()

    def on_arrival_ended(self, sequence: EngineSequence) -> None:
        """Let an arriving sequence run, or release its blocks if it has ended."""
        self.replan()
        self.scheduler.end_arrival(sequence)

    def _disaggregate(self, sequence: EngineSequence, reply: Reply) -> None:
        """Let a sequence wait for the KV of its prompt, or compute that KV for another worker."""
        if not isinstance(reply, PrefillCall):
            sequence.sources = () if self.kv_source is None else (self.kv_source,)
            return
        sequence.prefill_only = True
        if not sequence.min_length > sequence.prompt_tokens:
            sequence.stop_ids = frozenset()  # the other worker ends the answer
        reply.sequence = sequence
        self.prefill_calls[reply] = None

    async def _run_steps(self) -> None:
        while True:
            plan = self.scheduler.schedule()
            if self.scheduler.arriving.sequences:
                self.arrivals.update()
            if self.tiers is not None:
                self.tiers.on_planned(plan)
            if plan is None:
                await self._wait_for_work()
                continue
            if self._retried_requests:
                await self._retried_requests.begin(plan, self.end_sequence)
            result = await self._compute_step(plan)
            if result is not None:
                self.scheduler.complete(plan, result.tokens)
                if self.token_gaps.target_s:
                    self.token_gaps.on_step(plan.decode_seqs)
                if self.prefill_calls:
                    report_blocks(self.prefill_calls, self.end_sequence)
                self._deliver_step(plan, result)
            self.publish_kv_events()
            if self._simulation is not None:
                await self._simulation.fast_forward.skip_steady_steps(plan)

    async def _wait_for_work(self) -> None:
        self._work_arrived.clear()
        await self._work_arrived.wait()
        if self._simulation is not None:
            await self._simulation.wait_until_quiescent()

    async def _compute_step(self, plan: StepPlan) -> StepResult | None:
        self.counters.steps += 1
        try:
            step = self.runner.step(plan)
            tokens = plan.new_tokens
            return await (self.prefill_speed.measure(tokens, step) if tokens else step)
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
                    self.end_sequence(sequence, error)
            index += 1
        self.counters.generated_tokens += index

    def _deliver_skipped_steps(self, steps: int, sampled: Sequence[Sequence[int]]) -> None:
        """Deliver the tokens of `steps` skipped steps, a list for each running sequence."""
        running = self.scheduler.running.copy()
        for sequence, ids in zip(running, sampled, strict=True):
            if not sequence.request_state.reply.tokens(ids):
                self.end_sequence(sequence)
        self.counters.steps += steps
        self.counters.generated_tokens += steps * len(running)
        if self.token_gaps.target_s and self._simulation is not None:
            ends = self._simulation.fast_forward.delivered_step_ends
            self.token_gaps.on_skipped_steps(ends, len(running))
        self.publish_kv_events()

    def _deliver_token(
        self, sequence: EngineSequence, token: int, extra: TokenLogprobs | None
    ) -> None:
        """Send one token to its reply and end the sequence if the answer is complete."""
        reply = sequence.request_state.reply
        output_tokens = sequence.length - sequence.prompt_tokens
        if output_tokens == 1:
            self.counters.cached_tokens += sequence.cached_tokens
            begin_reply(sequence)
        grammar = sequence.grammar
        if grammar is not None and not sequence.feed_grammar():
            self.end_sequence(sequence, grammar.failure())
        elif token in sequence.stop_ids and sequence.length > sequence.min_length:
            reply.finish(sequence.make_finish("stop", token))
            self.end_sequence(sequence)
        elif not reply.tokens((token,), None if extra is None else (extra,)):
            self.end_sequence(sequence)
        elif grammar is not None and grammar.finished and not sequence.prefill_only:
            reply.finish(sequence.make_finish("stop"))
            self.end_sequence(sequence)
        elif sequence.length >= sequence.max_length:
            reply.finish(sequence.make_finish("length"))
            self.end_sequence(sequence)

    def end_sequence(self, sequence: EngineSequence, error: BaseException | None = None) -> None:
        """End the request of a sequence, with `error` if there is one."""
        self.scheduler.remove(sequence)
        sequence.request_state.complete(error)

    def publish_kv_events(self) -> None:
        """Publish the changes of the prefix cache and of its tiers since the last call."""
        events = self._pool.take_events()
        if self.tiers is not None:
            events += self.tiers.take_events()
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
            arriving = scheduler.arriving.sequences
            held = [call.sequence for call in self.prefill_calls]
            for sequence in [*scheduler.running, *scheduler.waiting, *arriving, *held]:
                self.end_sequence(sequence, WorkerFailed(failure.message))
