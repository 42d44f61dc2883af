"""The router's own book: what it placed on each worker, what has come of it, and so when that
worker will be free. It needs no word from the workers, which are late by nature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from dynamo.core.kv_events import worker_name
from dynamo.core.values import EngineInfo, Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.data_parallel import (
    data_parallel_ranks,
    engine_info,
    per_rank_engine_info,
)
from dynamo.scheduling.router.latency_model import WorkerLatencyModel, WorkerSlowdown
from dynamo.scheduling.router.placement_handle import Placement
from dynamo.scheduling.router.prompt import Prompt

DEFAULT_MAX_BATCHED_TOKENS = 8_192
"""Prompt tokens of one step, of a worker that does not tell."""

DEFAULT_MAX_SEQUENCES = 256
"""Requests that a worker works on at a time, if it does not tell."""

REFRESH_INTERVAL_S = 0.1
"""From this age on the sums over a worker's requests are taken anew."""

REFRESHES_PER_CALL = 16
"""So many at a time, so that a decision over hundreds of workers stays quick."""

SAME_STEP_S = 0.001
"""First tokens nearer than this came from one step."""

STALL_HALVING_TOKENS = 50.0
"""An answer this long is hurt half as much by a pause as one that has just begun."""


class PlacedRequest(Placement):
    """A request placed on a worker, until it ends. `new_tokens`: of its prompt, to be computed;
    `due_s`: when its first token is expected; `observed`: its times may teach."""

    __slots__ = (
        "end_callback",
        "expected_first_token_s",
        "first_token_callback",
        "first_token_s",
        "hashes",
        "id",
        "new_tokens",
        "placed_s",
        "prefill_ms_at_first_token",
        "prompt_tokens",
        "updates_model",
        "worker",
    )

    def __init__(
        self, request_key: str, book: WorkerState, prompt: Prompt, new_tokens: int, now: float
    ) -> None:
        super().__init__()
        self.id = request_key
        self.worker = book
        self.prompt_tokens = prompt.tokens
        self.hashes = prompt.hashes
        self.new_tokens = new_tokens
        self.placed_s = now
        self.expected_first_token_s = now
        self.first_token_s: float | None = None
        self.prefill_ms_at_first_token = 0.0
        self.updates_model = True
        self.first_token_callback: Callable[[PlacedRequest], None] = _ignore
        self.end_callback: Callable[[PlacedRequest], None] = _ignore

    def on_first_token(self) -> None:
        self.first_token_callback(self)

    def end(self) -> None:
        self.end_callback(self)


def _ignore(active: PlacedRequest) -> None:
    del active


LatencyModelKey = tuple[str, int]


def latency_model_key(info: EngineInfo | None) -> LatencyModelKey:
    """What workers of one model must share to be thought equally fast. How many blocks each found
    room for does not matter."""
    return ("", 0) if info is None else (info.engine, info.max_num_batched_tokens)


class PrefillGroup(msgspec.Struct):
    """Prompts whose first tokens came together, from one or more steps; `context`: of those that
    decoded meanwhile."""

    start_s: float
    end_s: float
    tokens: int
    context: int


class WorkerState:
    """One worker, or one data-parallel rank of it, as the router sees it. Times in seconds of the
    router's clock, durations in milliseconds where the name says so.

    `open_tokens`, `open_count`: prompts whose first token is still out; `free_s`: when the last of
    those is expected to come; `context`: tokens of all that decode; `youth`: the sum over active
    requests of 1 / (tokens emitted + 50); `load`: as last reported by the worker; `others_tokens`,
    `others_count`: prompts and requests in that report that others sent there.
    """

    __slots__ = (
        "__weakref__",
        "_prefill_group",
        "_refreshed_s",
        "active",
        "decode_context_tokens",
        "engine_info",
        "external_prefill_tokens",
        "external_requests",
        "instance",
        "latency_model",
        "load",
        "name",
        "pending_prefill_tokens",
        "pending_prefills",
        "prefill_free_s",
        "rank",
        "slowdown",
        "stall_sensitivity",
        "step_ms",
        "token_budget",
        "token_ms",
        "total_prefill_ms",
    )

    def __init__(
        self, name: str, instance: Instance, timing: WorkerLatencyModel, rank: int | None = None
    ) -> None:
        self.name = name
        self.rank = rank
        self.latency_model = timing
        self.slowdown = WorkerSlowdown()
        self.active: dict[str, PlacedRequest] = {}
        self.pending_prefill_tokens = 0
        self.pending_prefills = 0
        self.prefill_free_s = 0.0
        self.total_prefill_ms = 0.0
        self.decode_context_tokens = 0
        self.stall_sensitivity = 0.0
        self.load: Load | None = None
        self.external_prefill_tokens = 0
        self.external_requests = 0
        self._refreshed_s = float("-inf")
        self._prefill_group = PrefillGroup(0.0, 0.0, 0, 0)
        self._update_step_times()
        self.update_instance(instance)

    def update_instance(self, instance: Instance) -> None:
        """Discovery says (again) what it is."""
        self.instance = instance
        info = engine_info(instance)
        if info is not None and self.rank is not None:
            info = per_rank_engine_info(info)
        self.engine_info = info
        self.token_budget = (
            self.engine_info.max_num_batched_tokens
            if self.engine_info
            else DEFAULT_MAX_BATCHED_TOKENS
        )

    def refresh(self, now: float) -> None:
        """Take the sums over the active requests anew, unless that was done of late. In between
        they follow what comes and goes, but not how answers grow."""
        if now - self._refreshed_s < REFRESH_INTERVAL_S:
            return
        self._refreshed_s = now
        context, youth = 0, 0.0
        for active in self.active.values():
            emitted = active.emitted
            youth += 1.0 / (emitted + STALL_HALVING_TOKENS)
            if active.first_token_s is not None:
                context += active.prompt_tokens + emitted
        self.decode_context_tokens = context
        self.stall_sensitivity = youth
        self._update_step_times()

    def predict_prefill_ms(self, new_tokens: int) -> float:
        """T(n): from the start of a prompt's first step to its first token."""
        steps = -(-new_tokens // self.token_budget)
        return steps * self.step_ms + self.token_ms * new_tokens

    def backlog_ms(self, now: float) -> float:
        """How long the prefills that are open will still take. One that is late is expected to take
        as long again as it is late by: it is not done, whatever was predicted."""
        return abs(self.prefill_free_s - now) * 1e3 if self.pending_prefills else 0.0

    def kv_cache_usage(self) -> float:
        """Of its KV memory: what is in use there by its own last report (by this book where there
        is none), and what the prompts need that are not computed, or were placed since."""
        told, info = self.load, self.engine_info
        if told is not None and told.total_blocks:
            share = told.active_blocks / told.total_blocks
            held = 0
        else:
            share, held = 0.0, self.decode_context_tokens
        if info is not None:
            share += (held + self.pending_prefill_tokens) / (info.num_blocks * info.block_tokens)
        return min(share, 1.0)

    def on_load_report(self, load: Load) -> None:
        """The worker's own word about its load. What this book knows of is not counted again."""
        self.load = load
        self.external_prefill_tokens = max(0, load.prefill_tokens - self.pending_prefill_tokens)
        self.external_requests = max(0, load.running + load.waiting - len(self.active))

    def load_factor(self) -> float:
        """Between 0 and 1, the larger of two: a step's prompt tokens and its places taken."""
        places = self.engine_info.max_num_seqs if self.engine_info else DEFAULT_MAX_SEQUENCES
        busy = max(self.pending_prefill_tokens / self.token_budget, len(self.active) / places)
        return min(busy, 1.0)

    def place(self, active: PlacedRequest, now: float) -> None:
        """The request goes there now."""
        took_ms = self.predict_prefill_ms(active.new_tokens)
        backlog_ms = together_ms = self.backlog_ms(now)
        if self.pending_prefills:  # what waits there shares its steps
            together_ms = min(backlog_ms, self.predict_prefill_ms(self.pending_prefill_tokens))
        self.prefill_free_s = now + backlog_ms * 1e-3 + took_ms * 1e-3
        active.expected_first_token_s = now + (together_ms + took_ms) * 1e-3
        self.pending_prefills += 1
        self.pending_prefill_tokens += active.new_tokens
        self.active[active.id] = active
        self.stall_sensitivity += 1.0 / STALL_HALVING_TOKENS

    def add_decoding(self, active: PlacedRequest, emitted: int, now: float) -> None:
        """A request that another router sent here is being answered already."""
        active.updates_model = False
        active.emitted = emitted
        active.first_token_s = now
        self.active[active.id] = active
        self._refreshed_s = float("-inf")

    def on_cached_tokens(self, active: PlacedRequest, tokens: int) -> None:
        """So much of its prompt need not be computed, as the worker said."""
        if active.first_token_s is None and active.id in self.active:
            saved = min(tokens, active.new_tokens - 1)
            active.new_tokens -= saved
            self.pending_prefill_tokens -= saved

    def on_first_token(self, active: PlacedRequest, now: float) -> None:
        """Its prefill is done."""
        if active.first_token_s is not None or active.id not in self.active:
            return
        active.first_token_s = now
        if active.updates_model:
            self._observe_prefill(active, now)
        self._finish_prefill(active, now)
        self.decode_context_tokens += active.prompt_tokens
        active.prefill_ms_at_first_token = self.total_prefill_ms

    def remove(self, active: PlacedRequest, now: float) -> None:
        """It left, answered or not."""
        if self.active.pop(active.id, None) is None:
            return
        self.stall_sensitivity = max(
            0.0, self.stall_sensitivity - 1.0 / (active.emitted + STALL_HALVING_TOKENS)
        )
        if active.first_token_s is None:
            self._finish_prefill(active, now)
            return
        if active.updates_model:
            self._observe_decode(active, now)
        self.decode_context_tokens = max(
            0, self.decode_context_tokens - active.prompt_tokens - active.emitted
        )
        self._update_step_times()

    def _finish_prefill(self, active: PlacedRequest, now: float) -> None:
        self.pending_prefills -= 1
        self.pending_prefill_tokens -= active.new_tokens
        if self.pending_prefills == 0:
            self.prefill_free_s = now
            self._observe_prefill_group()
        elif self.prefill_free_s < now:
            self.prefill_free_s = now + self.predict_prefill_ms(self.pending_prefill_tokens) * 1e-3
        self._update_step_times()

    def _update_step_times(self) -> None:
        timing, factor = self.latency_model, self.slowdown.factor
        decode_ms = (
            timing.decode.predict(1.0, self.decode_context_tokens)
            if self.decode_context_tokens
            else 0.0
        )
        self.step_ms = factor * (timing.prefill.base + decode_ms)
        self.token_ms = factor * timing.prefill.slope

    def _observe_prefill(self, active: PlacedRequest, now: float) -> None:
        """Prompts whose first tokens come together are one observation, settled when the next
        comes or none is left: the time since the step before (or since placing, where the worker
        was idle)."""
        group = self._prefill_group
        if group.tokens and now - group.end_s < SAME_STEP_S:
            group.end_s = now
            group.tokens += active.new_tokens
            return
        self._observe_prefill_group()
        start = max(group.end_s, active.placed_s)
        self._prefill_group = PrefillGroup(
            start, now, active.new_tokens, self.decode_context_tokens
        )

    def _observe_prefill_group(self) -> None:
        group = self._prefill_group
        if not group.tokens:
            return
        self._prefill_group = PrefillGroup(group.end_s, group.end_s, 0, 0)
        tokens, context = group.tokens, group.context
        steps = -(-tokens // self.token_budget)
        took_ms = (group.end_s - group.start_s) * 1e3
        timing, factor = self.latency_model, self.slowdown.factor
        decode_ms = steps * timing.decode.predict(1.0, context) if context else 0.0
        expected_ms = timing.prefill.predict(steps, tokens)
        self.total_prefill_ms += expected_ms * factor
        timing.prefill.observe(steps, tokens, took_ms / factor - decode_ms)
        self.slowdown.observe(expected_ms + decode_ms, took_ms)

    def _observe_decode(self, active: PlacedRequest, now: float) -> None:
        """Its mean time between tokens, less what prefills took meanwhile."""
        if active.first_token_s is None or active.emitted < 8:
            return
        took_ms = (now - active.first_token_s) * 1e3 - (
            self.total_prefill_ms - active.prefill_ms_at_first_token
        )
        step_ms = took_ms / (active.emitted - 1) / self.slowdown.factor
        self.latency_model.decode.observe(1.0, self.decode_context_tokens, step_ms)


class WorkerStates:
    """The books of all workers, in the order in which they were announced; of one with
    data-parallel ranks a book a rank, called "instance/rank" as by its publishers."""

    def __init__(self) -> None:
        self.workers: list[WorkerState] = []
        self._by_name: dict[str, WorkerState] = {}
        self._latency_models: dict[LatencyModelKey, WorkerLatencyModel] = {}
        self._next = 0

    def __getitem__(self, name: str) -> WorkerState:
        return self._by_name[name]

    def get(self, name: str) -> WorkerState | None:
        """The book of a worker, if it is there."""
        return self._by_name.get(name)

    @property
    def cacheless(self) -> set[str]:
        """Those that keep nothing for later prompts."""
        return {
            one.name
            for one in self.workers
            if one.engine_info and not one.engine_info.prefix_caching
        }

    def refresh_next(self, now: float) -> None:
        """Survey the next few workers in turn."""
        books = self.workers
        if len(books) <= REFRESHES_PER_CALL:
            for book in books:
                book.refresh(now)
            return
        for _ in range(REFRESHES_PER_CALL):
            self._next = (self._next + 1) % len(books)
            books[self._next].refresh(now)

    def update_instances(self, instances: Mapping[str, Instance]) -> list[str]:
        """These are the workers from now on; the names of those that are gone."""
        workers = {
            worker_name(name, rank): (instance, rank)
            for name, instance in instances.items()
            for rank in data_parallel_ranks(instance)
        }
        gone = [name for name in self._by_name if name not in workers]
        for name in gone:
            del self._by_name[name]
        for name, (instance, rank) in workers.items():
            book = self._by_name.get(name)
            if book is None:
                kind = latency_model_key(engine_info(instance))
                timing = self._latency_models.get(kind)
                if timing is None:
                    timing = self._latency_models[kind] = WorkerLatencyModel()
                self._by_name[name] = WorkerState(name, instance, timing, rank)
            elif book.instance is not instance:
                book.update_instance(instance)
        self.workers = list(self._by_name.values())
        return gone

    def on_load_report(self, name: str, load: Load, now: float) -> None:
        """A worker's own word about its load, for the book of each of its ranks."""
        del now
        parts = {worker_name(name, rank): part for rank, part in enumerate(load.ranks)}
        for each, part in (parts or {name: load}).items():
            if (book := self._by_name.get(each)) is not None:
                book.on_load_report(part)
