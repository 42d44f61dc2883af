"""The loop that every engine of ours shares: arrivals, schedule, compute, deliver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Listed

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, WorkerFailed
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import Tasks
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    KvEvent,
    Load,
    Started,
    TokenLogprobs,
)
from dynamo.inference.batching import BatchLimits, HitsFrom, StepScheduler
from dynamo.inference.blocks import BlockPool
from dynamo.inference.eviction import Eviction
from dynamo.inference.leap import Leaper
from dynamo.inference.runner import Runner, StepPlan, StepResult
from dynamo.inference.sequence import Content, Sequence, TokenContent

log = logging.getLogger(__name__)
EventListener = Callable[[Listed[KvEvent]], None]
Known = Callable[[GenerateRequest], tuple[Content, int, int]]
"""The content of a request's prompt, its length, and that of its answer."""
Settled = Callable[[], Awaitable[None]]
"""Returns when nothing else happens at this instant."""


class Job:
    """One request in work: where its tokens go, and who waits for its end. `begun`: the reply knows
    that it is in the batch."""

    __slots__ = ("begun", "done", "reply")

    def __init__(self, reply: Reply, done: asyncio.Future[None]) -> None:
        self.reply = reply
        self.done = done
        self.begun = False

    def end(self, error: BaseException | None = None) -> None:
        """Let the waiting request return, or raise."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Counters:
    """Totals since the start, for the metrics."""

    __slots__ = ("cached_tokens", "generated_tokens", "prompt_tokens", "requests", "steps")

    def __init__(self) -> None:
        self.requests = 0
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0


class Simulation(msgspec.Struct, frozen=True):
    """What an engine is given under virtual time. `known` None: requests are what they say."""

    known: Known | None
    settled: Settled
    leaper: Leaper


class BatchedEngine(Engine):
    """Continuous batching over a block pool, computed by a runner."""

    def __init__(
        self,
        runner: Runner,
        *,
        eos_token_ids: Iterable[int] = (),
        hits_from: HitsFrom = "computed",
        prefix_caching: bool = True,
        eviction: Eviction | None = None,
        simulation: Simulation | None = None,
    ) -> None:
        self._runner = runner
        self._eos = frozenset(eos_token_ids)
        self._hits_from: HitsFrom = hits_from
        self._prefix_caching = prefix_caching
        self._eviction = eviction
        self._simulation = simulation
        self._tasks = Tasks(self._died)
        self._wake = asyncio.Event()
        self._suspects: set[Sequence] = set()
        self._given: dict[int, Sequence] = {}
        self._listeners: list[EventListener] = []
        self._mourners: list[Callable[[], None]] = []
        self.failure: WorkerFailed | None = WorkerFailed("the engine has not started")
        self.counters = Counters()

    async def start(self) -> EngineInfo:
        info = await self._runner.start()
        self._pool = BlockPool(
            info.num_blocks,
            info.block_tokens,
            eviction=self._eviction,
            prefix_caching=self._prefix_caching,
        )
        limits = BatchLimits(info.max_num_seqs, info.max_num_batched_tokens, info.context_tokens)
        self.scheduler = StepScheduler(self._pool, limits, hits_from=self._hits_from)
        if self._simulation is not None:
            self._simulation.leaper.attach(self.scheduler, self._deliver_leap)
        self._vocab_size = info.vocab_size
        self.failure = None
        self._tasks.start(self._run(), "engine steps")
        return info

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        job = Job(reply, asyncio.get_running_loop().create_future())
        sequence = self._sequence(request, job)
        self._interrupt()
        self.scheduler.add(sequence)
        self._given[id(reply)] = sequence
        if context.attempt:
            self._suspects.add(sequence)
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.prompt_tokens
        self._wake.set()
        try:
            await job.done
        finally:
            self._given.pop(id(reply), None)
            self._suspects.discard(sequence)
            if not sequence.ended:
                self._interrupt()
                self.scheduler.remove(sequence)

    def holds(self, reply: Reply) -> bool:
        sequence = self._given.get(id(reply))
        if sequence is None or sequence.owner.done.done():
            return True
        return sequence in self.scheduler.running or sequence in self.scheduler.waiting

    def load(self) -> Load:
        if self.failure is not None:
            return Load()
        self.catch_up()
        scheduler, pool = self.scheduler, self._pool
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prefill_tokens=scheduler.prefill_tokens(),
            active_blocks=pool.active,
            total_blocks=pool.num_blocks,
            cached_blocks=pool.cached,
            decode_tokens=sum(sequence.computed for sequence in scheduler.running),
            steps=self.counters.steps,
        )

    async def stop(self) -> None:
        self._fail_all(WorkerFailed("the engine was stopped"))
        await self._tasks.close()
        await self._runner.stop()

    def on_kv_events(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def held_blocks(self) -> Listed[KvEvent]:
        return self._pool.held_blocks()

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the engine's loop has failed: nothing is answered any more."""
        self._mourners.append(listener)

    def clear_blocks(self) -> int:
        """Forget the prefix cache; how many blocks were held."""
        count = self._pool.clear()
        self._tell_events()
        return count

    def catch_up(self) -> None:
        """Under virtual time: hand out every token that is computed by now."""
        if self._simulation is not None:
            self._simulation.leaper.catch_up()

    def _interrupt(self) -> None:
        if self._simulation is not None:
            self._simulation.leaper.interrupt()

    def _sequence(self, request: GenerateRequest, job: Job) -> Sequence:
        if self._simulation is not None and self._simulation.known is not None:
            known, prompt_tokens, answer_tokens = self._simulation.known(request)
            return Sequence(known, prompt_tokens, answer_tokens, request=request, owner=job)
        content = TokenContent(request.token_ids, self._pool.block_tokens, request.salt)
        tokens = content.tokens
        if tokens and self._vocab_size and max(tokens) >= self._vocab_size:
            raise InvalidRequest(
                f"token id {max(tokens)} is not in the vocabulary of {self._vocab_size}",
                param="prompt",
            )
        stops = request.stops
        if stops.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        sequence = Sequence(
            content,
            len(tokens),
            stops.max_tokens,
            priority=request.priority,
            request=request,
            owner=job,
        )
        sequence.min_length += stops.min_tokens
        stop_ids = frozenset(stops.stop_token_ids)
        sequence.stop_ids = stop_ids if stops.ignore_eos else stop_ids | self._eos
        return sequence

    async def _run(self) -> None:
        while True:
            plan = self.scheduler.schedule()
            if plan is None:
                await self._idle()
                continue
            if self._suspects:
                await self._tell_admitted(plan)
            result = await self._compute(plan)
            if result is not None:
                self.scheduler.complete(plan, result.tokens)
                self._deliver(plan, result)
            self._tell_events()
            if self._simulation is not None:
                await self._simulation.leaper.leap(plan)

    async def _idle(self) -> None:
        self._wake.clear()
        await self._wake.wait()
        if self._simulation is not None:
            await self._simulation.settled()

    async def _tell_admitted(self, plan: StepPlan) -> None:
        """A request that failed elsewhere is told when it enters the batch, and hears it before the
        step is computed: should that be the last of this worker, it is known who was in it."""
        admitted = self._suspects.intersection(chunk.sequence for chunk in plan.chunks)
        for sequence in admitted:
            try:
                self._begin(sequence)
            except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
                self._end(sequence, error)
        self._suspects -= admitted
        await asyncio.sleep(0)

    def _begin(self, sequence: Sequence) -> None:
        job: Job = sequence.owner
        if not job.begun:
            job.begun = True
            job.reply.begin(
                Started(cached_tokens=sequence.cached_tokens, prompt_tokens=sequence.prompt_tokens)
            )

    async def _compute(self, plan: StepPlan) -> StepResult | None:
        self.counters.steps += 1
        try:
            return await self._runner.step(plan)
        except Exception as error:
            log.exception("a step failed", extra={"fields": {"sequences": len(plan.chunks)}})
            for chunk in plan.chunks:
                self.scheduler.remove(chunk.sequence)
                chunk.sequence.owner.end(WorkerFailed(f"the engine failed in a step: {error}"))
            return None

    def _deliver(self, plan: StepPlan, result: StepResult) -> None:
        index = 0
        tokens, logprobs = result.tokens, result.logprobs
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            if not sequence.ended:
                extra = logprobs[index] if logprobs is not None else None
                try:
                    self._give(sequence, tokens[index], extra)
                except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
                    self._end(sequence, error)
            index += 1
        self.counters.generated_tokens += index

    def _deliver_leap(self, steps: int, sampled: Listed[Listed[int]]) -> None:
        """So many steps were taken at once; the running sequences have a token of each."""
        running = self.scheduler.running.copy()
        for sequence, ids in zip(running, sampled, strict=True):
            if not sequence.owner.reply.tokens(ids):
                self._end(sequence)
        self.counters.steps += steps
        self.counters.generated_tokens += steps * len(running)
        self._tell_events()

    def _give(self, sequence: Sequence, token: int, extra: TokenLogprobs | None) -> None:
        """Hand one token to its request, and end it where it ends."""
        reply: Reply = sequence.owner.reply
        given = sequence.length - sequence.prompt_tokens
        if given == 1:
            self.counters.cached_tokens += sequence.cached_tokens
            self._begin(sequence)
        if token in sequence.stop_ids and sequence.length > sequence.min_length:
            reply.finish(Finish("stop", given - 1, token))
            self._end(sequence)
        elif not reply.tokens((token,), None if extra is None else (extra,)):
            self._end(sequence)
        elif sequence.length >= sequence.max_length:
            reply.finish(Finish("length", given))
            self._end(sequence)

    def _end(self, sequence: Sequence, error: BaseException | None = None) -> None:
        self.scheduler.remove(sequence)
        sequence.owner.end(error)

    def _tell_events(self) -> None:
        events = self._pool.take_events()
        if events:
            for listener in self._listeners:
                listener(events)

    def _died(self, error: BaseException) -> None:
        log.error("the engine's loop failed", exc_info=error)
        self._fail_all(WorkerFailed("the engine has failed"))
        for listener in self._mourners:
            listener()

    def _fail_all(self, failure: WorkerFailed) -> None:
        started = self.failure is None
        self.failure = failure
        if started:
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                self._end(sequence, WorkerFailed(failure.message))
