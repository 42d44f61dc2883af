#!/usr/bin/env python3
"""Fuzz the parsers of frames, HTTP, JSON and answers. Exits with 1 if there are findings.

    scripts/fuzz.py [--seconds 600] [--only frames|http|framing|json|answers] [--seed N]
        [--outputs FOLDER]

Each fuzzer prints the number of inputs, the slowest one and the growth of memory after the first
fifth of the time. A finding is printed with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzz.answers_target import COLLECTION, AnswersTarget
from tests.fuzz.campaign import Target, run
from tests.fuzz.frames_target import FramesTarget
from tests.fuzz.framing_target import FramingTarget
from tests.fuzz.http_targets import HttpTarget, JsonTarget

TARGETS: dict[str, type[Target]] = {
    "frames": FramesTarget,
    "http": HttpTarget,
    "framing": FramingTarget,
    "json": JsonTarget,
    "answers": AnswersTarget,
}


def main() -> int:
    """Run the fuzzers one after the other. Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="duration of each fuzzer (600)")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one fuzzer")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--outputs", type=Path, default=COLLECTION, help="of the target answers")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    findings = 0
    for name in [options.only] if options.only else TARGETS:
        target = AnswersTarget(None, options.outputs) if name == "answers" else TARGETS[name]()
        result = asyncio.run(run(target, options.seconds, options.seed))
        print(
            f"{name}: {result.runs} inputs, slowest {result.slowest_s * 1e3:.0f} ms, "
            f"memory {result.grown_bytes / 1e6:+.1f} MB, {result.open_count} left open, "
            f"{len(result.findings)} findings",
            flush=True,
        )
        for finding in result.findings:
            print(f"  {finding[:2000]}")
        findings += len(result.findings) + result.open_count
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
