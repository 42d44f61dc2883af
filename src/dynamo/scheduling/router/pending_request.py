"""A request that has not been placed yet."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from math import inf
from typing import TYPE_CHECKING

from dynamo.scheduling.router.labels import NO_CONSTRAINTS
from dynamo.scheduling.workers.prompt import Prompt

if TYPE_CHECKING:
    from dynamo.scheduling.router.policy import Decision
    from dynamo.scheduling.workers.tier_queues import BlockLoad


class PendingRequest:
    """A request in the placement solver. `overlaps`: worker -> leading prompt blocks that it need
    not compute, as of `overlaps_updated_s`. `loads`: the part of them that lies below its device.
    `excluded`: ids of instances and names of ranks that the request must not go to.
    `constraints`: requested labels, for selectors. `decision_future`: resolved with the decision.
    `priority` and `deadline_s` order the queue; times are in seconds of the router's clock."""

    __slots__ = (
        "arrived_s",
        "block_tokens",
        "constraints",
        "deadline_s",
        "decision_future",
        "excluded",
        "id",
        "loads",
        "max_tokens",
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
        self.loads: dict[str, BlockLoad] = {}
        self.constraints = NO_CONSTRAINTS
        self.priority = self.max_tokens = 0
        self.deadline_s = inf
        self.decision_future: asyncio.Future[Decision] | None = None

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the worker with the longest overlap would compute, at least 1."""
        blocks = max(self.overlaps.values(), default=0)
        return max(1, self.prompt.tokens - blocks * self.block_tokens)

    def uncached_tokens(self, worker: str) -> int:
        """Return the prompt tokens that `worker` would compute; the last token always."""
        tokens = self.prompt.tokens - self.overlaps.get(worker, 0) * self.block_tokens
        return max(1, tokens)

    def tier_blocks(self, worker: str) -> dict[str, int]:
        """Return tier -> prompt blocks that `worker` would load from it."""
        load = self.loads.get(worker)
        return load.by_tier() if load else {}

    def is_short_everywhere(self, workers: int, most_tokens: int) -> bool:
        """Whether all `workers` have the same overlap, and would compute at most `most_tokens`. A
        request that loads blocks is not, since the queues of its tiers differ."""
        if self.loads:
            return False
        depths = self.overlaps.values()
        overlap = next(iter(depths), 0)
        return (
            self.prompt.tokens - overlap * self.block_tokens <= most_tokens
            and len(depths) in {0, workers}
            and len(set(depths)) <= 1
        )
