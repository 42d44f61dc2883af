#!/usr/bin/env python3
"""Compare the stories of requests with what their client measured.

    benchmarks/story_truth.py --model DIR [--requests 10000] [--scenes kv,moved,...]

Each scene is a deployment that gets requests of all surfaces: chats and completions, streamed and
whole, Responses, Messages. Some have two choices, some are cut off by the client, some are refused.
The observer must know each of them. The target is that the stages of a story sum up to it within
1 ms. At the 99th percentile, the times to the first text and to the end must agree with the client's
clock within 2 ms. The machine must be idle: whatever delays the client's process counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from processes import deployment_of, ready
from servers import Server, start_ours
from targets import Targets

ROUND = 1_000
"""Requests after which stories are read: the observer keeps the last 2,000."""
AT_ONCE = 4
WORDS = ("over", "and", "after", "world", "water", "long", "house", "number", "people", "day")
TIMING = ("--timing", "constant:0.05,4")
TIERS = ("--num-blocks", "200", "--kv-host-size", "64MB")
SCENES: dict[str, tuple[str, tuple[str, ...]]] = {
    "round_robin": ("round_robin", ()),
    "kv": ("kv", ()),
    "tiers": ("kv", TIERS),
    "disaggregated": ("kv", ("--prefill-workers", "1", "--disagg", "always")),
    "moved": ("kv", ()),
}
"""Router mode and flags. In "moved", workers are killed while requests are in flight."""
SURFACES = ("chat", "chat stream", "text", "text stream n", "responses", "messages", "cut", "bad")


class Seen(NamedTuple):
    """A request as its client saw it. `first_s`: when the body of a stream began to come."""

    name: str
    surface: str
    first_s: float | None
    seconds: float


def make_call(surface: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request."""
    stream = "stream" in surface or surface == "cut"
    fields = {"model": "smol", "stream": stream, "max_tokens": 12}
    chat = {"messages": [{"role": "user", "content": prompt}]}
    if surface.startswith("text"):
        extra = {"n": 2} if surface.endswith(" n") else {}
        return "/v1/completions", fields | {"prompt": prompt, "ignore_eos": True} | extra
    if surface == "responses":
        return "/v1/responses", {"model": "smol", "input": prompt, "max_output_tokens": 12}
    if surface == "messages":
        return "/v1/messages", fields | chat
    if surface == "bad":
        return "/v1/chat/completions", fields | chat | {"temperature": -1}
    tokens = {"max_tokens": 400} if surface == "cut" else {}
    return "/v1/chat/completions", fields | chat | {"ignore_eos": True} | tokens


class Client:
    """Sends requests one after the other over connections of their own."""

    def __init__(self, server: Server) -> None:
        self._where = urlsplit(server.url)
        self._rng = random.Random(3)
        self._numbers = itertools.count()
        self.seen: list[Seen] = []

    async def send(self, surface: str) -> None:
        """Send a request, read its answer, and note its times from the last byte sent."""
        name = f"t{next(self._numbers)}"
        prompt = " ".join(self._rng.choices(WORDS, k=self._rng.randrange(5, 300)))
        path, fields = make_call(surface, prompt)
        body = json.dumps(fields).encode()
        reader, writer = await asyncio.open_connection(self._where.hostname, self._where.port)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began_s = time.monotonic()
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        first_s, data = None, b""
        while part := await reader.read(1 << 16):
            data += part
            if first_s is None and b'"content":"' in data.replace(b'"content":""', b""):
                first_s = time.monotonic() - began_s
            if surface == "cut" and len(data) > 2_000:
                break
        took_s = time.monotonic() - began_s
        writer.close()
        self.seen.append(Seen(name, surface, first_s, took_s))


def read_stories(server: Server) -> dict[str, dict[str, Any]]:
    """Return the stories by the client's request id."""
    observer = ready(deployment_of(server), "observer")[0]
    with urllib.request.urlopen(f"{observer.address}/requests?limit=4000", timeout=60) as answer:
        return {story["client_id"]: story for story in json.load(answer)["requests"]}


async def run(scene: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send the requests of a scene, and compare them with their stories."""
    mode, flags = SCENES[scene]
    server = start_ours(args.model, 2, 1.0, mode, *TIMING, *flags)
    client, sums, firsts, ends, missing = Client(server), [0.0], [0.0], [0.0], 0
    try:
        for start in range(0, args.requests, ROUND):
            client.seen.clear()
            count = min(ROUND, args.requests - start)
            await send_round(client, count, server if scene == "moved" else None)
            await asyncio.sleep(2.5)
            stories = read_stories(server)
            for seen in client.seen:
                story = stories.get(seen.name)
                if story is None:
                    missing += 1
                    continue
                stages = sum(stage["seconds"] for stage in story["stages"])
                sums.append(abs(stages - story["seconds"]))
                if seen.surface != "cut":
                    ends.append(abs(seen.seconds - story["seconds"]))
                if seen.first_s is not None and story["ttft"] and "stream" in seen.surface:
                    firsts.append(abs(seen.first_s - story["ttft"]))
    finally:
        server.stop()
    return {
        "requests": args.requests,
        "missing": missing,
        "stages_ms": max(sums) * 1e3,
        "first_p99_ms": p99(firsts) * 1e3,
        "end_p99_ms": p99(ends) * 1e3,
    }


async def send_round(client: Client, count: int, killed: Server | None) -> None:
    """Send so many requests, `AT_ONCE` at a time."""
    surfaces = itertools.islice(itertools.cycle(SURFACES), count)

    async def work() -> None:
        for surface in surfaces:
            await client.send(surface)

    tasks = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
    while killed is not None and not all(task.done() for task in tasks):
        await asyncio.sleep(2)
        workers = ready(deployment_of(killed), "worker")
        if len(workers) == 2:
            os.kill(workers[0].pid, signal.SIGKILL)
    await asyncio.gather(*tasks)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(len(values) * 0.99)]


def main() -> None:
    """Print a line for each scene, and check the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--requests", type=int, default=2_000, help="of each scene")
    args = parser.parse_args()
    targets, results = Targets(), dict[str, Any]()
    for scene in args.scenes.split(","):
        result = results[scene] = asyncio.run(run(scene, args))
        print(scene, json.dumps(result), flush=True)
        targets.at_most(f"{scene}: requests without a story", result["missing"], 0)
        targets.at_most(f"{scene}: stages beside the whole, ms", result["stages_ms"], 1.0)
        targets.at_most(f"{scene}: first text, p99 ms", result["first_p99_ms"], 2.0)
        targets.at_most(f"{scene}: end, p99 ms", result["end_p99_ms"], 2.0)
    targets.print_report(results, "stories")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
