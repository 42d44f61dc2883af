"""Service level objectives: whether a request was answered right and in time, and counts."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dynamo.core.errors import CANCELLED
from dynamo.telemetry.story import EndedStory

NOT_COUNTED, GOOD, FAILED, LATE_FIRST, LATE_GAP = 0, 1, 2, 4, 8
"""Values of `EndedStory.slo`. A late request has the sum of the last two if both were late."""


class SloCounts(msgspec.Struct, array_like=True):
    """Requests of a model since its process started, without those that do not count. `late` ones
    had a late first token, a long gap, or both. `failed` ones are not late."""

    requests: int = 0
    failed: int = 0
    late_first: int = 0
    late_gap: int = 0
    late: int = 0

    def count(self, outcome: int) -> None:
        """Count a request."""
        if outcome:
            self.requests += 1
            self.failed += outcome == FAILED
            self.late_first += bool(outcome & LATE_FIRST)
            self.late_gap += bool(outcome & LATE_GAP)
            self.late += outcome > FAILED


def judge_slo(
    story: EndedStory, ttft_us: float, gap_us: float, client_errors: Collection[str]
) -> int:
    """Return the outcome of a request, for promised times to the first token and between tokens.
    `client_errors`: codes of errors that clients make, which do not count. A request that its
    client gave up counts if a promise was broken before."""
    end, first_us = story.end, story.first_us
    if end and end != CANCELLED:
        return NOT_COUNTED if end in client_errors else FAILED
    if first_us is None:  # an embedding has no token, and an answer that was given up none yet
        first_us = story.ended_us if end else 0
    late = LATE_FIRST * (first_us > ttft_us) + LATE_GAP * (story.gap_us > gap_us)
    return late or (NOT_COUNTED if end else GOOD)
