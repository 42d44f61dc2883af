#!/usr/bin/env python3
"""Measure the CPU cost of the token log that lets a request continue on another worker.

    benchmarks/migration_cost.py

Prints the median of 25 runs of 200,000 tokens, one per call, as they come from a worker.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import Finish, Started
from dynamo.scheduling.migration import ResumableReply

TOKENS = 200_000
RUNS = 25


class IgnoringReply(Reply):
    """Ignores the answer."""

    __slots__ = ()

    def begin(self, started: Started) -> None:
        del started

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        return True

    def finish(self, end: Finish) -> None:
        del end


def us_per_token(make: Callable[[], Reply]) -> float:
    """Return the CPU microseconds per token of a reply."""
    payloads = [(number % 50_000,) for number in range(TOKENS)]
    times = []
    for _ in range(RUNS):
        tokens = make().tokens
        began = time.process_time()
        for payload in payloads:
            tokens(payload)
        times.append((time.process_time() - began) / TOKENS * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print the difference."""
    plain, remembered = (
        us_per_token(IgnoringReply),
        us_per_token(lambda: ResumableReply(IgnoringReply())),
    )
    print(f"{remembered - plain:.3f} us per token ({plain:.3f} without, {remembered:.3f} with)")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
