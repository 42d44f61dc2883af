"""A request of a fast replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo.operations.replay.fast.run_cache import Held
from dynamo.operations.replay.trace import TraceRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest


class FastRequest:
    """A request at the worker of that number. `keys`: the units of its prompt, of which the first
    `units` have full blocks, `named_blocks` in all. `held`: the cached runs that it references, of
    `held_units`.

    `length`: its tokens as far as known. `computed`: those of the prompt whose KV is there.
    `run_blocks`, `own_blocks`: its blocks in runs, and others of its prompt. `recomputed`: the
    tokens of the answer that it had before it was preempted last. `first_step`, `end_step`: see
    `FastWorker`; 0 without a token.
    """

    __slots__ = (
        "admitted",
        "arrived_s",
        "cached_tokens",
        "computed",
        "end_s",
        "end_step",
        "first_step",
        "first_token_s",
        "held",
        "held_units",
        "keys",
        "length",
        "named_blocks",
        "output_tokens",
        "own_blocks",
        "placed",
        "prompt_tokens",
        "recomputed",
        "row",
        "run_blocks",
        "trace_request",
        "turns",
        "units",
        "worker",
    )

    def __init__(self, turn: TraceRequest, block_tokens: int, unit: int, now: float) -> None:
        self.trace_request = turn
        self.row = turn.row
        self.keys: Sequence[int] = turn.block_ids
        self.length = self.prompt_tokens = turn.prompt_tokens
        full = min(turn.prompt_tokens // block_tokens, len(turn.block_ids) * unit)
        self.named_blocks, self.units = full, -(-full // unit)
        self.output_tokens = turn.output_tokens
        self.arrived_s = now
        self.first_token_s = self.end_s = 0.0
        self.cached_tokens = self.computed = self.recomputed = 0
        self.run_blocks = self.own_blocks = 0
        self.first_step = self.end_step = 0
        self.admitted = False
        self.held: list[Held] = []
        self.held_units = 0
        self.placed: PlacedRequest | None = None
        self.worker = -1
        self.turns: Iterator[TraceRequest] = iter(())
