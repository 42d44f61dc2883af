"""A request that has not been placed yet."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from math import inf
from typing import TYPE_CHECKING

from dynamo.scheduling.router.labels import NO_CONSTRAINTS
from dynamo.scheduling.router.prompt import Prompt

if TYPE_CHECKING:
    from dynamo.scheduling.router.policy import Decision


class PendingRequest:
    """`overlaps`: worker -> leading blocks of the prompt that it holds (as far as is known at
    `looked_s`); `barred`: instances that it must not go to; `constraints`: the
    labels that it asks for, as selectors are told; `decided`: resolved when it is placed;
    `priority`, `deadline_s`: for the order of those that wait."""

    __slots__ = (
        "arrived_s",
        "block_tokens",
        "constraints",
        "deadline_s",
        "decision_future",
        "excluded",
        "id",
        "overlaps",
        "overlaps_updated_s",
        "priority",
        "prompt",
    )

    def __init__(
        self,
        id: str,  # noqa: A002
        prompt: Prompt,
        block_tokens: int,
        now: float,
        excluded: AbstractSet[str] = frozenset(),
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.block_tokens = block_tokens
        self.excluded = excluded
        self.arrived_s = now
        self.overlaps_updated_s = now
        self.overlaps: dict[str, int] = {}
        self.constraints = NO_CONSTRAINTS
        self.priority = 0
        self.deadline_s = inf
        self.decision_future: asyncio.Future[Decision] | None = None

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompt that its best holder would compute."""
        held = max(self.overlaps.values(), default=0)
        return max(1, self.prompt.tokens - held * self.block_tokens)

    def uncached_tokens(self, worker: str) -> int:
        """Tokens of the prompt that `worker` would compute; the last one always."""
        tokens = self.prompt.tokens - self.overlaps.get(worker, 0) * self.block_tokens
        return max(1, tokens)

    def common_overlap(self, workers: int) -> int | None:
        """Blocks of the prompt that each of so many workers holds; None: some hold more than
        others."""
        held = self.overlaps
        if not held:
            return 0
        depths = set(held.values())
        return depths.pop() if len(held) == workers and len(depths) == 1 else None
