"""The router's own book: what it placed on each worker, what has come of it, and so when that
worker will be free. It needs no word from the workers, which are late by nature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from dynamo.core.kv_events import worker_name
from dynamo.core.values import EngineInfo, Load
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.placing.ranks import engine_info, ranks_of, share_of
from dynamo.scheduling.router.placing.timing import Pace, Timing
from dynamo.scheduling.router.policy import Ticket
from dynamo.scheduling.router.prompt import Prompt

BATCHED_TOKENS = 8_192
"""Prompt tokens of one step, of a worker that does not tell."""

SEQUENCES = 256
"""Requests that a worker works on at a time, if it does not tell."""

SURVEY_S = 0.1
"""From this age on the sums over a worker's requests are taken anew."""

SURVEYS = 16
"""So many at a time, so that a decision over hundreds of workers stays quick."""

SAME_STEP_S = 0.001
"""First tokens nearer than this came from one step."""

YOUNG_TOKENS = 50.0
"""An answer this long is hurt half as much by a pause as one that has just begun."""


class Active(Ticket):
    """A request placed on a worker, until it ends. `new_tokens`: of its prompt, to be computed;
    `due_s`: when its first token is expected; `observed`: its times may teach."""

    __slots__ = (
        "book",
        "due_s",
        "first_s",
        "hashes",
        "id",
        "new_tokens",
        "observed",
        "on_end",
        "on_first",
        "placed_s",
        "prefill_before_ms",
        "prompt_tokens",
    )

    def __init__(self, id: str, book: Book, prompt: Prompt, new_tokens: int, now: float) -> None:  # noqa: A002
        super().__init__()
        self.id = id
        self.book = book
        self.prompt_tokens = prompt.tokens
        self.hashes = prompt.hashes
        self.new_tokens = new_tokens
        self.placed_s = now
        self.due_s = now
        self.first_s: float | None = None
        self.prefill_before_ms = 0.0
        self.observed = True
        self.on_first: Callable[[Active], None] = _nobody
        self.on_end: Callable[[Active], None] = _nobody

    def first_token(self) -> None:
        self.on_first(self)

    def end(self) -> None:
        self.on_end(self)


def _nobody(active: Active) -> None:
    del active


Kind = tuple[str, int]


def kind_of(info: EngineInfo | None) -> Kind:
    """What workers of one model must share to be thought equally fast. How many blocks each found
    room for does not matter."""
    return ("", 0) if info is None else (info.engine, info.max_num_batched_tokens)


class Group(msgspec.Struct):
    """Prompts whose first tokens came together, from one or more steps; `context`: of those that
    decoded meanwhile."""

    start_s: float
    end_s: float
    tokens: int
    context: int


class Book:
    """One worker, or one data-parallel rank of it, as the router sees it. Times in seconds of the
    router's clock, durations in milliseconds where the name says so.

    `open_tokens`, `open_count`: prompts whose first token is still out; `free_s`: when the last of
    those is expected to come; `context`: tokens of all that decode; `youth`: the sum over active
    requests of 1 / (tokens emitted + 50); `load`: as last reported by the worker; `others_tokens`,
    `others_count`: prompts and requests in that report that others sent there.
    """

    __slots__ = (
        "__weakref__",
        "_group",
        "_surveyed_s",
        "active",
        "context",
        "free_s",
        "info",
        "instance",
        "load",
        "name",
        "open_count",
        "open_tokens",
        "others_count",
        "others_tokens",
        "pace",
        "prefill_ms",
        "rank",
        "step_ms",
        "timing",
        "token_budget",
        "token_ms",
        "youth",
    )

    def __init__(
        self, name: str, instance: Instance, timing: Timing, rank: int | None = None
    ) -> None:
        self.name = name
        self.rank = rank
        self.timing = timing
        self.pace = Pace()
        self.active: dict[str, Active] = {}
        self.open_tokens = 0
        self.open_count = 0
        self.free_s = 0.0
        self.prefill_ms = 0.0
        self.context = 0
        self.youth = 0.0
        self.load: Load | None = None
        self.others_tokens = 0
        self.others_count = 0
        self._surveyed_s = float("-inf")
        self._group = Group(0.0, 0.0, 0, 0)
        self._tempo()
        self.announce(instance)

    def announce(self, instance: Instance) -> None:
        """Discovery says (again) what it is."""
        self.instance = instance
        info = engine_info(instance)
        if info is not None and self.rank is not None:
            info = share_of(info)
        self.info = info
        self.token_budget = self.info.max_num_batched_tokens if self.info else BATCHED_TOKENS

    def survey(self, now: float) -> None:
        """Take the sums over the active requests anew, unless that was done of late. In between
        they follow what comes and goes, but not how answers grow."""
        if now - self._surveyed_s < SURVEY_S:
            return
        self._surveyed_s = now
        context, youth = 0, 0.0
        for active in self.active.values():
            emitted = active.emitted
            youth += 1.0 / (emitted + YOUNG_TOKENS)
            if active.first_s is not None:
                context += active.prompt_tokens + emitted
        self.context = context
        self.youth = youth
        self._tempo()

    def service_ms(self, new_tokens: int) -> float:
        """T(n): from the start of a prompt's first step to its first token."""
        steps = -(-new_tokens // self.token_budget)
        return steps * self.step_ms + self.token_ms * new_tokens

    def backlog_ms(self, now: float) -> float:
        """How long the prefills that are open will still take. One that is late is expected to take
        as long again as it is late by: it is not done, whatever was predicted."""
        return abs(self.free_s - now) * 1e3 if self.open_count else 0.0

    def memory_share(self) -> float:
        """Of its KV memory: what is in use there by its own last report (by this book where there
        is none), and what the prompts need that are not computed, or were placed since."""
        told, info = self.load, self.info
        if told is not None and told.total_blocks:
            share = told.active_blocks / told.total_blocks
            held = 0
        else:
            share, held = 0.0, self.context
        if info is not None:
            share += (held + self.open_tokens) / (info.num_blocks * info.block_tokens)
        return min(share, 1.0)

    def told(self, load: Load) -> None:
        """The worker's own word about its load. What this book knows of is not counted again."""
        self.load = load
        self.others_tokens = max(0, load.prefill_tokens - self.open_tokens)
        self.others_count = max(0, load.running + load.waiting - len(self.active))

    def load_factor(self) -> float:
        """Between 0 and 1, the larger of two: a step's prompt tokens and its places taken."""
        places = self.info.max_num_seqs if self.info else SEQUENCES
        busy = max(self.open_tokens / self.token_budget, len(self.active) / places)
        return min(busy, 1.0)

    def place(self, active: Active, now: float) -> None:
        """The request goes there now."""
        took_ms = self.service_ms(active.new_tokens)
        backlog_ms = together_ms = self.backlog_ms(now)
        if self.open_count:  # what waits there shares its steps
            together_ms = min(backlog_ms, self.service_ms(self.open_tokens))
        self.free_s = now + backlog_ms * 1e-3 + took_ms * 1e-3
        active.due_s = now + (together_ms + took_ms) * 1e-3
        self.open_count += 1
        self.open_tokens += active.new_tokens
        self.active[active.id] = active
        self.youth += 1.0 / YOUNG_TOKENS

    def join(self, active: Active, emitted: int, now: float) -> None:
        """A request that another router sent here is being answered already."""
        active.observed = False
        active.emitted = emitted
        active.first_s = now
        self.active[active.id] = active
        self._surveyed_s = float("-inf")

    def cached(self, active: Active, tokens: int) -> None:
        """So much of its prompt need not be computed, as the worker said."""
        if active.first_s is None and active.id in self.active:
            saved = min(tokens, active.new_tokens - 1)
            active.new_tokens -= saved
            self.open_tokens -= saved

    def first_token(self, active: Active, now: float) -> None:
        """Its prefill is done."""
        if active.first_s is not None or active.id not in self.active:
            return
        active.first_s = now
        if active.observed:
            self._observe_prefill(active, now)
        self._close(active, now)
        self.context += active.prompt_tokens
        active.prefill_before_ms = self.prefill_ms

    def end(self, active: Active, now: float) -> None:
        """It left, answered or not."""
        if self.active.pop(active.id, None) is None:
            return
        self.youth = max(0.0, self.youth - 1.0 / (active.emitted + YOUNG_TOKENS))
        if active.first_s is None:
            self._close(active, now)
            return
        if active.observed:
            self._observe_decode(active, now)
        self.context = max(0, self.context - active.prompt_tokens - active.emitted)
        self._tempo()

    def _close(self, active: Active, now: float) -> None:
        self.open_count -= 1
        self.open_tokens -= active.new_tokens
        if self.open_count == 0:
            self.free_s = now
            self._settle()
        elif self.free_s < now:
            self.free_s = now + self.service_ms(self.open_tokens) * 1e-3
        self._tempo()

    def _tempo(self) -> None:
        timing, factor = self.timing, self.pace.factor
        decode_ms = timing.decode.at(1.0, self.context) if self.context else 0.0
        self.step_ms = factor * (timing.prefill.base + decode_ms)
        self.token_ms = factor * timing.prefill.slope

    def _observe_prefill(self, active: Active, now: float) -> None:
        """Prompts whose first tokens come together are one observation, settled when the next
        comes or none is left: the time since the step before (or since placing, where the worker
        was idle)."""
        group = self._group
        if group.tokens and now - group.end_s < SAME_STEP_S:
            group.end_s = now
            group.tokens += active.new_tokens
            return
        self._settle()
        start = max(group.end_s, active.placed_s)
        self._group = Group(start, now, active.new_tokens, self.context)

    def _settle(self) -> None:
        group = self._group
        if not group.tokens:
            return
        self._group = Group(group.end_s, group.end_s, 0, 0)
        tokens, context = group.tokens, group.context
        steps = -(-tokens // self.token_budget)
        took_ms = (group.end_s - group.start_s) * 1e3
        timing, factor = self.timing, self.pace.factor
        decode_ms = steps * timing.decode.at(1.0, context) if context else 0.0
        expected_ms = timing.prefill.at(steps, tokens)
        self.prefill_ms += expected_ms * factor
        timing.prefill.observe(steps, tokens, took_ms / factor - decode_ms)
        self.pace.observe(expected_ms + decode_ms, took_ms)

    def _observe_decode(self, active: Active, now: float) -> None:
        """Its mean time between tokens, less what prefills took meanwhile."""
        if active.first_s is None or active.emitted < 8:
            return
        took_ms = (now - active.first_s) * 1e3 - (self.prefill_ms - active.prefill_before_ms)
        step_ms = took_ms / (active.emitted - 1) / self.pace.factor
        self.timing.decode.observe(1.0, self.context, step_ms)


class Fleet:
    """The books of all workers, in the order in which they were announced; of one with
    data-parallel ranks a book a rank, called "instance/rank" as by its publishers."""

    def __init__(self) -> None:
        self.books: list[Book] = []
        self._by_name: dict[str, Book] = {}
        self._timings: dict[Kind, Timing] = {}
        self._next = 0

    def __getitem__(self, name: str) -> Book:
        return self._by_name[name]

    def get(self, name: str) -> Book | None:
        """The book of a worker, if it is there."""
        return self._by_name.get(name)

    @property
    def cacheless(self) -> set[str]:
        """Those that keep nothing for later prompts."""
        return {one.name for one in self.books if one.info and not one.info.prefix_caching}

    def freshen(self, now: float) -> None:
        """Survey the next few workers in turn."""
        books = self.books
        if len(books) <= SURVEYS:
            for book in books:
                book.survey(now)
            return
        for _ in range(SURVEYS):
            self._next = (self._next + 1) % len(books)
            books[self._next].survey(now)

    def replace(self, instances: Mapping[str, Instance]) -> list[str]:
        """These are the workers from now on; the names of those that are gone."""
        workers = {
            worker_name(name, rank): (instance, rank)
            for name, instance in instances.items()
            for rank in ranks_of(instance)
        }
        gone = [name for name in self._by_name if name not in workers]
        for name in gone:
            del self._by_name[name]
        for name, (instance, rank) in workers.items():
            book = self._by_name.get(name)
            if book is None:
                kind = kind_of(engine_info(instance))
                timing = self._timings.get(kind)
                if timing is None:
                    timing = self._timings[kind] = Timing()
                self._by_name[name] = Book(name, instance, timing, rank)
            elif book.instance is not instance:
                book.announce(instance)
        self.books = list(self._by_name.values())
        return gone

    def reported(self, name: str, load: Load, now: float) -> None:
        """A worker's own word about its load, for the book of each of its ranks."""
        del now
        parts = {worker_name(name, rank): part for rank, part in enumerate(load.ranks)}
        for each, part in (parts or {name: load}).items():
            if (book := self._by_name.get(each)) is not None:
                book.told(part)
