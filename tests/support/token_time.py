"""An engine whose prompt tokens take a known time."""

from __future__ import annotations

from dynamo.core.timing.learner import TimingLearner
from dynamo.core.timing.model import StepCounts


class KnownTokenTime(TimingLearner):
    """Learns nothing from steps: a prompt token takes `token_s`."""

    token_s = 0.0  # type: ignore[assignment]

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self.token_s = token_s

    def observe(self, counts: StepCounts, seconds: float) -> None:
        """Ignore a step."""
