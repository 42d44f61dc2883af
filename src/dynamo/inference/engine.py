"""`BatchedEngine`: the loop of every local engine, which schedules, computes and delivers steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from dynamo.core.adapters import adapter_name
from dynamo.core.context import Context
from dynamo.core.errors import ModelNotFound, Unsupported, WorkerFailed
from dynamo.core.features import GRAMMAR_FEATURES
from dynamo.core.reply import LoraAdapters, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.worker_times import SequenceTimes
from dynamo.core.values import EngineInfo, EngineTotals, GenerateRequest, KvEvent, Load
from dynamo.inference.arrivals import EngineArrivals
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.eviction import EvictionPolicy
from dynamo.inference.fast_forward import RealTime
from dynamo.inference.kv_source import KvSource, PrefillSink
from dynamo.inference.model_runner import ModelRunner, StepPlan, StepResult
from dynamo.inference.requests.engine_core import EngineCore, RetriedRequests, open_grammar
from dynamo.inference.requests.prefill_calls import PrefillCall, report_blocks
from dynamo.inference.sequence import EngineSequence, RequestState, SequenceFactory
from dynamo.inference.step_scheduler import HitsFrom, StepScheduler
from dynamo.inference.tiers.kv_tiers import KvTiers, OpenTiers
from dynamo.models.grammar.matcher import GrammarCompiler

log = logging.getLogger(__name__)


class BatchedEngine(EngineCore):
    """An engine with continuous batching over a block pool. A `ModelRunner` computes its steps.
    `kv_source` supplies the KV of prompts that another worker computes; None: no such worker.
    `grammars`: enforces forms of answers; None: it cannot. `time`: skips steps of virtual time.
    `adapters`: those that the runner computes with; None: it cannot."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        eos_token_ids: Iterable[int] = (),
        hits_from: HitsFrom = "computed",
        prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
        time: RealTime | None = None,
        open_tiers: OpenTiers | None = None,
        grammars: GrammarCompiler | None = None,
        adapters: LoraAdapters | None = None,
    ) -> None:
        super().__init__(runner, time or RealTime())
        self.adapters = adapters
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._hits_from: HitsFrom = hits_from
        self._prefix_caching = prefix_caching
        self._eviction = eviction
        self._open_tiers = open_tiers
        self._tasks = BackgroundTasks(self._on_loop_failed)
        self._retried_requests = RetriedRequests()
        self._sequences: dict[Reply, EngineSequence] = {}
        self._failure_listeners: list[Callable[[], None]] = []
        self.prefill_calls: dict[PrefillCall, None] = {}
        self.failure: WorkerFailed | None = WorkerFailed("the engine has not started")
        self._sleeps = False
        self.arrivals = EngineArrivals(self)
        self.kv_source: KvSource | None = None

    async def start(self) -> EngineInfo:
        info = await self.runner.start()
        if self.adapters is not None:
            await self.adapters.start()
            info = replace(info, features=(*info.features, "adapters"))
        if self._grammars is not None:
            info = replace(info, features=(*info.features, *GRAMMAR_FEATURES))
        region = self.runner.region
        pool = BlockPool(
            info.num_blocks,
            info.block_tokens,
            eviction=self._eviction,
            prefix_caching=self._prefix_caching,
            generations=None if region is None else region.generations,
        )
        looks_ahead = self.runner.runs_ahead
        self.scheduler = StepScheduler(
            pool, info, hits_from=self._hits_from, looks_ahead=looks_ahead
        )
        self._time.attach(self.scheduler, self._deliver_skipped_steps)
        if self._open_tiers is not None and self._prefix_caching:
            self.tiers = self.scheduler.tiers = await KvTiers.open(self, self._open_tiers, info)
        self._sequence_factory = SequenceFactory(
            info.block_tokens,
            info.vocab_size,
            self._eos_token_ids,
            self._time.resolve_request,
            has_tiers=self.tiers.can_load,
        )
        self.failure = None
        self._tasks.start(self._run_steps(), "engine steps")
        return info

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        sequence = self._make_sequence(request)
        arrives = (request.prefill or request.kv_from) and not sequence.wants_prompt_logprobs
        if arrives and self.kv_source is not None:
            sequence.sources = (self.kv_source,)
        await self._run_sequence(sequence, context, reply)

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
        sequence = self._make_sequence(request)
        call = PrefillCall(self, self.runner.region, sink, have_blocks, sequence)
        self.prefill_calls[call] = None
        try:
            await self._run_sequence(sequence, context, call)
        finally:
            del self.prefill_calls[call]
            self._work_arrived.set()

    def _make_sequence(self, request: GenerateRequest) -> EngineSequence:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        if self._sleeps:
            raise WorkerFailed("the engine sleeps")
        if request.adapter and not (self.adapters and self.adapters.has(request.adapter)):
            name = adapter_name(request.adapter)
            raise ModelNotFound(f"LoRA adapter {name!r} is not loaded", param="model")
        return self._sequence_factory.make(request)

    async def _run_sequence(self, sequence: EngineSequence, context: Context, reply: Reply) -> None:
        """Compute a sequence and deliver its answer to `reply`."""
        request = sequence.request
        assert request is not None  # noqa: S101 - the factory has set it
        if request.structured is not None:
            if not await open_grammar(self._grammars, sequence, reply):
                return
            if self.failure is not None:
                raise WorkerFailed(self.failure.message)
        if request.itl_slo_ms:
            self.token_gaps.target_s = request.itl_slo_ms * 1e-3
        loop, scheduler = asyncio.get_running_loop(), self.scheduler
        completion = loop.create_future()
        ahead = [*scheduler.waiting, *scheduler.running, *scheduler.arriving.sequences]
        left = [each.length - each.computed_tokens for each in ahead]
        tokens = sum(count for count in left if count > 1)
        times = SequenceTimes(loop.time(), len(ahead), tokens, max(left, default=0))
        sequence.request_state = RequestState(reply, completion, context, times)
        self.replan()
        scheduler.add(sequence)
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
        scheduler, pool = self.scheduler, self.scheduler.pool
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
            tiers=self.tiers.report_load(),
            timing=self.timing_learner.coefficients,
        )

    async def stop(self) -> None:
        self._fail_all(WorkerFailed("the engine was stopped"))
        await self.arrivals.close()
        await self._tasks.close()
        await self.tiers.close()
        await self.runner.stop()

    def sleep_refusal(self, level: int) -> str:
        return "" if self.runner.can_sleep else super().sleep_refusal(level)

    async def sleep(self, level: int) -> None:
        """As in the interface. Tiers below host memory keep their blocks."""
        self._sleeps = True
        self._end_all(WorkerFailed("the engine sleeps"))
        self.scheduler.pool.clear()
        if "host" in {tier.name for tier in self.tiers.tiers}:
            self.tiers.clear("host")
        self.publish_kv_events()
        await self.runner.sleep(level)

    async def wake_up(self) -> None:
        await self.runner.wake_up()
        self._sleeps = False
        if events := self.tiers.snapshot_events():
            for listener in self._kv_event_listeners:
                listener(events)

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        return [*self.scheduler.pool.dump_events(), *self.tiers.snapshot_events()]

    def on_failure(self, listener: Callable[[], None]) -> None:
        self._failure_listeners.append(listener)

    def totals(self) -> EngineTotals:
        self.counters.preemptions = self.scheduler.preemptions
        self.counters.evicted_blocks = self.scheduler.pool.evictions
        return self.counters

    async def clear_blocks(self) -> int:
        return self.clear_prefix_cache()

    def clear_prefix_cache(self) -> int:
        """Empty the prefix cache with its tiers, and return how many blocks these held."""
        count = self.scheduler.pool.clear() + self.tiers.clear()
        self.tiers.take_events()  # the event of the pool is for all tiers
        self.publish_kv_events()
        return count

    async def _run_steps(self) -> None:
        while True:
            plan = self.scheduler.schedule()
            if self.scheduler.changes:
                self.note_times()
            if self.scheduler.arriving.sequences:
                self.arrivals.update()
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
            await self._time.skip_steady_steps(plan)

    async def _wait_for_work(self) -> None:
        self._work_arrived.clear()
        await self._work_arrived.wait()
        await self._time.wait_until_quiescent()
        self.step_gaps.ended_s = asyncio.get_running_loop().time()

    async def _compute_step(self, plan: StepPlan) -> StepResult | None:
        self.counters.steps += 1
        try:
            now = asyncio.get_running_loop().time
            began_s = now()
            result = await self.runner.step(plan)
            ended_s = now()
            self.timing_learner.observe(plan, ended_s - began_s)
            self.step_gaps.on_steps(ended_s, plan.seqs)
            if self.on_step is not None:
                self.on_step(plan.seqs, ended_s - began_s)
            return result
        except Exception as error:
            log.exception("a step failed", extra={"fields": {"sequences": len(plan.chunks)}})
            for chunk in plan.chunks:
                failure = WorkerFailed(f"the engine failed in a step: {error}")
                self.end_sequence(chunk.sequence, failure)
            return None

    def _on_loop_failed(self, error: BaseException) -> None:
        log.error("the engine's loop failed", exc_info=error)
        self._fail_all(WorkerFailed("the engine has failed"))
        for listener in self._failure_listeners:
            listener()

    def _fail_all(self, failure: WorkerFailed) -> None:
        started = self.failure is None
        self.failure = failure
        if started:
            self._end_all(failure)

    def _end_all(self, failure: WorkerFailed) -> None:
        scheduler = self.scheduler
        arriving = scheduler.arriving.sequences
        held = [call.sequence for call in self.prefill_calls]
        for sequence in [*scheduler.running, *scheduler.waiting, *arriving, *held]:
            self.end_sequence(sequence, WorkerFailed(failure.message))
