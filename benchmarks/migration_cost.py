#!/usr/bin/env python3
"""What it costs to remember every token that was sent, so that a request can go on elsewhere.

    benchmarks/migration_cost.py

CPU time; the median of 25 runs of 200,000 tokens, one a call, as they come from a worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import Finish, Started
from dynamo.scheduling.migration import ResumableReply

TOKENS = 200_000
RUNS = 25


class Nobody(Reply):
    """Takes everything."""

    __slots__ = ()

    def begin(self, started: Started) -> None:
        del started

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        return True

    def finish(self, end: Finish) -> None:
        del end


def us_a_token(make: Callable[[], Reply]) -> float:
    """Of one reply."""
    payloads = [(number % 50_000,) for number in range(TOKENS)]
    took = []
    for _ in range(RUNS):
        tokens = make().tokens
        began = time.process_time()
        for payload in payloads:
            tokens(payload)
        took.append((time.process_time() - began) / TOKENS * 1e6)
    return statistics.median(took)


def main() -> None:
    """Print the difference."""
    plain, remembered = us_a_token(Nobody), us_a_token(lambda: ResumableReply(Nobody()))
    print(f"{remembered - plain:.3f} us a token ({plain:.3f} without, {remembered:.3f} with)")


if __name__ == "__main__":
    main()
