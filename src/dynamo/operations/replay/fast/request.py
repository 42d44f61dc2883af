"""A request of a fast replay, and who follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from dynamo.core.values import KvEvent
from dynamo.operations.replay.fast.run_cache import Held
from dynamo.operations.replay.trace import TraceRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest


class FastRequest:
    """A request at the worker of that name. `keys`: the units of its prompt, of which the first
    `units` have full blocks, `named_blocks` in all. `held`: the cached runs that it references, of
    `held_units`.

    `length`: its tokens as far as known. `awaited`: the router waits for its first token there.
    `computed`: those of the prompt whose KV is there. `run_blocks`, `own_blocks`: its blocks in
    runs, and others of its prompt. `recomputed`: the tokens of the answer that it had before it was
    preempted or moved last; the last of them came at `last_token_s`. `moves`: workers that died,
    `deaths`: those in a row before they gave a token. `first_step`, `end_step`: see `FastWorker`; 0
    without a token. `source`: the worker that computes the prompt, if another one. `sink`:
    is called with the time of each step that has computed a part of a prompt for another worker.
    `excluded`: workers that may not be chosen, by name.
    """

    __slots__ = (
        "admitted", "arrived_s", "awaited", "cached_tokens", "computed", "deaths", "end_s",
        "end_step", "excluded", "first_step", "first_token_s", "held", "held_units", "keys",
        "last_token_s", "length", "moves", "named_blocks", "output_tokens", "own_blocks", "placed",
        "prompt_tokens", "recomputed", "row", "run_blocks", "sink", "source", "trace_request",
        "turns", "units", "worker",
    )  # fmt: skip

    def __init__(self, turn: TraceRequest, block_tokens: int, unit: int, now: float) -> None:
        self.trace_request = turn
        self.row = turn.row
        self.keys: Sequence[int] = turn.block_ids
        self.length = self.prompt_tokens = turn.prompt_tokens
        full = min(turn.prompt_tokens // block_tokens, len(turn.block_ids) * unit)
        self.named_blocks, self.units = full, -(-full // unit)
        self.output_tokens = turn.output_tokens
        self.arrived_s = now
        self.first_token_s = self.last_token_s = self.end_s = 0.0
        self.cached_tokens = self.computed = self.recomputed = 0
        self.run_blocks = self.own_blocks = 0
        self.first_step = self.end_step = 0
        self.deaths = self.moves = 0
        self.admitted, self.awaited = False, True
        self.held: list[Held] = []
        self.held_units = 0
        self.placed: PlacedRequest | None = None
        self.worker = self.source = ""
        self.excluded: frozenset[str] = frozenset()
        self.sink: Callable[[float], None] | None = None
        self.turns: Iterator[TraceRequest] = iter(())

    @property
    def prompt_key(self) -> int | None:
        """The key of the whole prompt; None if it has no full block that others find."""
        return self.keys[self.units - 1] if self.units else None

    def restart(self, recomputed: int, now: float) -> None:
        """Forget what a worker has computed, but for `recomputed` tokens of the answer."""
        if recomputed > self.recomputed:
            self.last_token_s = now
        self.recomputed, self.length = recomputed, self.prompt_tokens + recomputed
        self.computed = self.first_step = self.end_step = 0
        self.held, self.held_units, self.run_blocks, self.own_blocks = [], 0, 0, 0
        self.source = ""


class WorkerListener(ABC):
    """Gets what happens at workers."""

    @abstractmethod
    def on_first_token(self, request: FastRequest) -> None:
        """Take note of a first token."""

    @abstractmethod
    def on_finished(self, request: FastRequest) -> None:
        """Take note of an end."""

    @abstractmethod
    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        """Let another worker compute a prompt whose blocks are reserved, and which has some."""

    @abstractmethod
    def on_kv_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        """Take note of units that the worker of that name has cached or evicted."""
