#!/usr/bin/env python3
"""Measure the KV index: matches, stored and removed events, memory, its file; compare with RadixTree.

benchmarks/kv_index.py [--peer-python PEER/bin/python] [--blocks 1000000]
benchmarks/kv_index.py --against OLD/src [--rounds 2]

`--against` compares with the index of another copy of the sources, in turns. `--peer-python` compares
with Dynamo's RadixTree.

- A chain has 512 blocks, an event 16 of them.
- Matches search an index with `--blocks` other blocks, each prompt in turn, so that CPU caches are as
  cold as in production. Times of matches are medians.
- `whole`: every worker holds the whole prompt.
- `shared`: all workers hold the first 8 blocks, four of them random depths.
- `spread`: every worker holds a random depth.
- `look`: the router's query for a prompt, predictions included. All prompts have 32 common blocks, and
  every worker has five prompts routed to it.
- `turns`: the longest CPU time of one thread while the whole index is copied for its file, and while
  the file is read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parents[1] / "src"
CHAIN = 512
EVENT = 16
PROMPTS = {8: 200, 64: 200, 512: 40}
"""Prompts by the number of workers."""


class Subject(ABC):
    """An index under test."""

    @abstractmethod
    def stored(self, parent: int, hashes: Sequence[int]) -> bytes:
        """Return an encoded event of stored blocks."""

    @abstractmethod
    def removed(self, hashes: Sequence[int]) -> bytes:
        """Return an encoded event of removed blocks."""

    @abstractmethod
    def apply(self, worker: int, event: bytes) -> None:
        """Apply an encoded event."""

    @abstractmethod
    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return the number of matching blocks by worker."""


class Ours(Subject):
    def __init__(self) -> None:
        from dynamo.core.clock import SystemClock
        from dynamo.core.kv_events import decode_kv_events, encode_kv_events
        from dynamo.core.values import BlocksRemoved, BlocksStored
        from dynamo.scheduling.index import CacheView

        self._stored, self._removed = BlocksStored, BlocksRemoved
        self._encode, self._decode = encode_kv_events, decode_kv_events
        self._view = CacheView(SystemClock(), budget_bytes=1 << 32)
        self.index = self._view.device_index

    def stored(self, parent: int, hashes: Sequence[int]) -> bytes:
        return self._encode([self._stored(parent, tuple(hashes))])

    def removed(self, hashes: Sequence[int]) -> bytes:
        return self._encode([self._removed(tuple(hashes))])

    def apply(self, worker: int, event: bytes) -> None:
        self._view.apply(f"w{worker}", self._decode(event))

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        return {int(name[1:]): depth for name, depth in self.index.match(hashes).items()}


class Peer(Subject):
    def __init__(self) -> None:
        from dynamo.llm import RadixTree

        self._tree = RadixTree()
        self._event = 0

    def stored(self, parent: int, hashes: Sequence[int]) -> bytes:
        blocks = [{"block_hash": block, "tokens_hash": block} for block in hashes]
        return self._wrap({"stored": {"parent_hash": parent or None, "blocks": blocks}})

    def removed(self, hashes: Sequence[int]) -> bytes:
        return self._wrap({"removed": {"block_hashes": list(hashes)}})

    def _wrap(self, data: dict[str, object]) -> bytes:
        self._event += 1
        return json.dumps({"event_id": self._event, "data": data, "dp_rank": 0}).encode()

    def apply(self, worker: int, event: bytes) -> None:
        self._tree.apply_event(worker, event)

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        scores = self._tree.find_matches(hashes).scores
        return {worker: depth for (worker, _), depth in scores.items()}


def chain(rng: random.Random) -> list[int]:
    return [rng.getrandbits(63) + 1 for _ in range(CHAIN)]


def parts(hashes: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    return [
        (hashes[at - 1] if at else 0, hashes[at : at + EVENT])
        for at in range(0, len(hashes), EVENT)
    ]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def fill(subject: Subject, blocks: int, rng: random.Random) -> dict[str, float]:
    """Store `blocks` blocks in chains on 8 workers and return the cost."""
    before, spent, count = resident(), 0.0, 0
    while count < blocks:
        events = [subject.stored(parent, part) for parent, part in parts(chain(rng))]
        worker = count // CHAIN % 8
        start = time.process_time()
        for event in events:
            subject.apply(worker, event)
        spent += time.process_time() - start
        count += CHAIN
    return {
        "stored_us_per_block": spent / count * 1e6,
        "bytes_per_block": (resident() - before) / count,
    }


def depths(kind: str, fleet: int, rng: random.Random) -> list[int]:
    if kind == "whole":
        return [CHAIN] * fleet
    if kind == "shared":
        return [rng.randint(9, CHAIN) for _ in range(4)] + [8] * (fleet - 4)
    return [rng.randint(1, CHAIN) for _ in range(fleet)]


def matching(
    subject: Subject, match: Callable[[Sequence[int]], object], kind: str, fleet: int
) -> float:
    rng = random.Random(fleet)
    prompts = []
    for _ in range(PROMPTS[fleet]):
        prompt = chain(rng)
        deep = depths(kind, fleet, rng)
        for worker, depth in enumerate(deep):
            subject.apply(worker, subject.stored(0, prompt[:depth]))
        assert subject.match(prompt) == dict(enumerate(deep))
        prompts.append((prompt, deep))
    times = []
    for _ in range(3):
        for prompt, _ in prompts:
            start = time.perf_counter()
            match(prompt)
            times.append(time.perf_counter() - start)
    for prompt, deep in prompts:
        for worker, depth in enumerate(deep):
            subject.apply(worker, subject.removed(prompt[:depth][::-1]))
    return statistics.median(times) * 1e6


def index_alone(rng: random.Random) -> dict[str, float]:
    """Measure our index without decoding of events."""
    from dynamo.scheduling.index import KvIndex

    index, stored, removed, again = KvIndex(1 << 32), [], [], []
    for worker in ("a", "b"):
        times = stored if worker == "a" else again
        rng.seed(1)
        for _ in range(200):
            prompt = chain(rng)
            start = time.perf_counter()
            for parent, part in parts(prompt):
                index.store(worker, parent, part)
            times.append((time.perf_counter() - start) / CHAIN)
    rng.seed(1)
    for _ in range(200):
        prompt = chain(rng)
        start = time.perf_counter()
        for _, part in reversed(parts(prompt)):
            index.remove("a", part[::-1])
        removed.append((time.perf_counter() - start) / CHAIN)
    named = {"stored_new": stored, "stored_known": again, "removed": removed}
    return {f"{name}_us_per_block": statistics.median(of) * 1e6 for name, of in named.items()}


def looking(fleet: int) -> float:
    """Return the median microseconds of `CacheView.overlaps`."""
    from dynamo.core.clock import SystemClock
    from dynamo.core.values import BlocksStored
    from dynamo.scheduling.index import CacheView

    view, rng = CacheView(SystemClock(), budget_bytes=1 << 30), random.Random(fleet)
    stem = chain(rng)[:32]
    prompts = [stem + chain(rng)[32:] for _ in range(fleet * 5)]
    for number, prompt in enumerate(prompts):
        view.apply(f"w{number % fleet}", [BlocksStored(0, tuple(prompt[:300]))])
        view.on_request_routed(f"w{(number + 1) % fleet}", prompt)
    times = []
    for prompt in prompts[:100] * 5:
        start = time.perf_counter()
        view.find_overlaps(prompt)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def turns(index: object, block_tokens: int = 16) -> dict[str, float]:
    """Return the longest CPU times, in ms, while the index is copied and while it is read."""
    from dynamo.scheduling.index import KvIndex
    from dynamo.services.index_file import encode_snapshot, restore_snapshot

    frames: list[bytes] = []
    copying = longest(encode_snapshot(index, block_tokens), frames.append)
    reading = longest(restore_snapshot(KvIndex(1 << 32), b"".join(frames), block_tokens), id)
    return {"copy": copying, "read": reading}


def longest(steps: Iterator[object], take: Callable[[object], object]) -> float:
    most, start = 0.0, time.thread_time()
    for step in steps:
        most = max(most, time.thread_time() - start)
        take(step)
        start = time.thread_time()
    return round(most * 1e3, 2)


def measure(peer: bool, blocks: int) -> dict[str, object]:
    rng = random.Random(0)
    subject: Subject = Peer() if peer else Ours()
    result: dict[str, object] = dict(fill(subject, blocks, rng))
    match = subject.index.match if isinstance(subject, Ours) else subject.match
    for kind in ("whole", "shared", "spread"):
        result[f"match_{kind}_us"] = {
            fleet: round(matching(subject, match, kind, fleet), 1) for fleet in PROMPTS
        }
    if isinstance(subject, Ours):
        result["look_us"] = {fleet: round(looking(fleet), 1) for fleet in (8, 64)}
        result["without_decoding"] = index_alone(rng)
        try:
            result["turns_ms"] = turns(subject.index)
        except ImportError:  # sources from before files were made of turns
            result["turns_ms"] = None
    return result


def in_turns(against: str, rounds: int, blocks: int) -> None:
    """Measure both sources in turns and print a line each."""
    for _ in range(rounds):
        for name, path in (("against", against), ("this", str(HERE))):
            command = [sys.executable, __file__, "--blocks", str(blocks), "--single"]
            environ = {**os.environ, "PYTHONPATH": path}
            completed = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environ
            )
            print(json.dumps({name: json.loads(completed.stdout)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--peer-python", default="", help="a Python that has ai-dynamo")
    parser.add_argument("--against", default="", help="the src folder of other sources of ours")
    parser.add_argument("--rounds", type=int, default=2, help="with --against")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer or args.single:
        print(json.dumps(measure(args.peer, args.blocks)))
        return
    if args.against:
        in_turns(args.against, args.rounds, args.blocks)
        return
    print(json.dumps({"ours": measure(False, args.blocks)}, indent=1), flush=True)
    if args.peer_python:
        command = [args.peer_python, __file__, "--peer", "--blocks", str(args.blocks)]
        completed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(json.dumps({"peer": json.loads(completed)}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
