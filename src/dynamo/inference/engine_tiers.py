"""`EngineTiers`: the interface of the tiers below an engine's blocks. By itself, it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.core.values import KvEvent, TierLoad
from dynamo.inference.kv_source import KvSource
from dynamo.inference.model_runner import StepPlan
from dynamo.inference.sequence import EngineSequence


class EngineTiers:
    """The tiers below the blocks of an engine: none, unless `KvTiers` overrides every method."""

    tiers: Sequence[Any] = ()
    """The `KvTier` objects, fastest first."""
    can_load = False
    """Whether blocks of a prompt may come from a tier."""

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way down."""
        return False

    def on_planned(self, plan: StepPlan | None) -> None:
        """Move blocks down, and those of waiting prompts up, while the engine computes a step."""

    def is_prefetching(self, sequence: EngineSequence) -> bool:
        """Whether blocks of a waiting sequence come into host memory. Then it keeps waiting."""
        del sequence
        return False

    def sources_for(
        self, sequence: EngineSequence, have_blocks: int, full: int
    ) -> Sequence[KvSource]:
        """Return the sources of the blocks that follow the first `have_blocks` of `full` ones. A
        tier comes before the sources that the sequence has, or replaces them."""
        del have_blocks, full
        return sequence.sources

    def take_events(self) -> list[KvEvent]:
        """Return the changes of all tiers since the last call."""
        return []

    def snapshot_events(self) -> list[KvEvent]:
        """Return events that rebuild the present state of the tiers. Large tiers follow in later
        events."""
        return []

    def report_load(self) -> tuple[TierLoad, ...]:
        """Return the state of the tiers that work."""
        return ()

    def clear(self, name: str = "") -> int:
        """Empty the tier `name`, or all of them, and return how many blocks they held. If all are
        emptied, the caller publishes an event for all tiers."""
        del name
        return 0

    async def close(self) -> None:
        """End the copies in flight and close the tiers."""
