#!/usr/bin/env python3
"""Measure the CPU of the KV index for the events of a whole trace, evictions included.

benchmarks/kv_events.py TRACE.jsonl [--requests 3500] [--speed 3] [--workers 8] [--against OLD/src]

The events of `dynamo replay` in mode kv are recorded and applied to a separate index, twice. With
`--against`, they are also applied to the index of other sources, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parents[1] / "src"
ENGINE = ("--num-blocks", "16384", "--block-size", "64", "--max-num-batched-tokens", "8192")

Recorded = list[tuple[str, int | None, tuple[int, ...]]]
"""(worker, parent or None for removed blocks, hashes)"""


def record(trace: Path, speed: str, workers: str) -> Recorded:
    from dynamo.__main__ import main as dynamo
    from dynamo.core.values import BlocksRemoved, BlocksStored
    from dynamo.scheduling.index import CacheView

    events: Recorded = []
    apply = CacheView.apply

    def record_changes(view: CacheView, worker: str, changes: tuple[object, ...]) -> None:
        for change in changes:
            if isinstance(change, BlocksStored):
                events.append((worker, change.parent, change.hashes))
            elif isinstance(change, BlocksRemoved):
                events.append((worker, None, change.hashes))
        apply(view, worker, changes)

    CacheView.apply = record_changes
    sys.argv = [
        "dynamo",
        "replay",
        str(trace),
        "--router-mode",
        "kv",
        "--workers",
        workers,
        *ENGINE,
    ]
    sys.argv += ["--speed", speed, "--trace-block-size", "512", "--json", os.devnull]
    try:
        dynamo()
    except SystemExit as end:
        if end.code:
            raise
    return events


def play(path: str) -> dict[str, float]:
    """Apply the recorded events and return the CPU microseconds per block."""
    from dynamo.scheduling.index import KvIndex

    with Path(path).open("rb") as file:
        events: Recorded = pickle.load(file)
    index, used_ns, blocks = KvIndex(1 << 30), [0, 0], [0, 0]
    for worker, parent, hashes in events:
        start = time.thread_time_ns()
        if parent is None:
            index.remove(worker, hashes)
        else:
            index.store(worker, parent, hashes)
        used_ns[parent is None] += time.thread_time_ns() - start
        blocks[parent is None] += len(hashes)
    stored, removed = (round(ns / 1e3 / of, 3) for ns, of in zip(used_ns, blocks, strict=True))
    return {"stored": stored, "removed": removed, "blocks": sum(blocks)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3_500)
    parser.add_argument("--speed", default="3")
    parser.add_argument("--workers", default="8")
    parser.add_argument("--against", default="", help="the src folder of other sources of ours")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        print(json.dumps(play(args.trace)))
        return
    with tempfile.TemporaryDirectory() as folder:
        part, events = Path(folder) / "trace.jsonl", Path(folder) / "events"
        with args.trace.open(encoding="utf-8") as lines:
            part.write_text("".join(islice(lines, args.requests)), encoding="utf-8")
        events.write_bytes(pickle.dumps(record(part, args.speed, args.workers)))
        sources = [args.against, str(HERE)] if args.against else [str(HERE)]
        for path in sources * 2:
            command = [sys.executable, __file__, str(events), "--play"]
            environ = {**os.environ, "PYTHONPATH": path}
            completed = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environ
            )
            print(path, completed.stdout, end="", flush=True)


if __name__ == "__main__":
    main()
