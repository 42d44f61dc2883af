#!/usr/bin/env python3
"""Inject causes of slow requests among healthy traffic, and count how often `dynamo why` names them.

    benchmarks/blame.py --model DIR [--causes frozen,overload] [--requests 200]

Mock workers take 0.1 ms a prompt token and 5 ms a step. For each cause, a fresh deployment first serves
healthy requests, which tell what is usual. Then the cause is injected again and again until so many
requests were slowed by it. A request was slowed if it took `SLOWED_S` longer than the median of healthy
ones. Where other requests prepare the cause, only the one that it is for counts. The target is that
the observer names the cause first for 95 % of them; of a pair, both among the first two. At most 2 % of
the other requests, which run all the time, may be blamed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from processes import deployment_of, ready
from servers import Server, start_ours
from targets import Targets

sys.path.insert(0, str(Path(__file__).parents[1]))  # from here on, for tests.support
from tests.support.servers import NatsProcess, S3Process, ServerProcess

TIMING = ("--timing", "constant:0.1,5")
WORDS = ("over", "and", "after", "world", "water", "long", "house", "number", "people", "day")
HEALTHY, SHORT, LONG, ANSWER = 60, 60, 5_000, 40
SLOWED_S = 0.15
PAUSE_S = 0.12


class Call(NamedTuple):
    """A request that ended: its id and how long it took."""

    name: str
    seconds: float


class Client:
    """Sends requests to a deployment and keeps their times by kind: "v" may be hit by the cause."""

    def __init__(self, server: Server, service: ServerProcess | None = None) -> None:
        self.server, self.service = server, service
        self._where = urlsplit(server.url)
        self._numbers = itertools.count()
        self.rng = random.Random(7)
        self.calls: dict[str, list[Call]] = {"h": [], "v": []}

    def words(self, count: int) -> str:
        """Return a prompt of about so many tokens."""
        return " ".join(self.rng.choices(WORDS, k=count))

    async def send(
        self,
        kind: str,
        prompt: str,
        *,
        tokens: int = ANSWER,
        read_after_s: float = 0.0,
        **body: Any,
    ) -> None:
        """Send a request and wait for its whole answer."""
        name, began = f"{kind}{next(self._numbers)}", time.monotonic()
        fields = {
            "model": "smol",
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            **body,
        }
        data = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        sock = socket.socket()
        if read_after_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (self._where.hostname, self._where.port))
        try:
            await loop.sock_sendall(sock, head.encode() + data)
            if read_after_s:
                await asyncio.sleep(read_after_s)
            while await loop.sock_recv(sock, 1 << 16):
                pass
        finally:
            sock.close()
        self.calls[kind].append(Call(name, time.monotonic() - began))

    async def burst(self, kind: str, count: int, **body: Any) -> None:
        """Send so many short requests at once."""
        sends = (self.send(kind, self.words(SHORT), **body) for _ in range(count))
        await asyncio.gather(*sends)


async def long_prompt(client: Client) -> None:
    """A long prompt at each worker, and short ones behind it."""
    ahead = [asyncio.create_task(client.send("x", client.words(LONG), tokens=1)) for _ in range(2)]
    await asyncio.sleep(PAUSE_S)
    await client.burst("v", 6)
    await asyncio.gather(*ahead)


async def overload(client: Client) -> None:
    """Many requests at once."""
    await client.burst("v", 80)


async def frozen(client: Client) -> None:
    """A worker stands still, with requests in flight."""
    await _signal_worker(client, signal.SIGSTOP)


async def killed(client: Client) -> None:
    """A worker is killed, with requests in flight."""
    await _signal_worker(client, signal.SIGKILL)


async def _signal_worker(client: Client, number: signal.Signals) -> None:
    burst = asyncio.create_task(client.burst("v", 40))
    await asyncio.sleep(PAUSE_S)
    worker = ready(deployment_of(client.server), "worker")[0]
    os.kill(worker.pid, number)
    await burst
    while len(ready(deployment_of(client.server), "worker")) < 2:
        await asyncio.sleep(0.2)


async def stalled(client: Client) -> None:
    """The frontend stands still for less time than the supervisor allows."""
    burst = asyncio.create_task(client.burst("v", 20))
    await asyncio.sleep(PAUSE_S)
    frontend = ready(deployment_of(client.server), "frontend")[0]
    os.kill(frontend.pid, signal.SIGSTOP)
    await asyncio.sleep(0.8)
    os.kill(frontend.pid, signal.SIGCONT)
    await burst
    await asyncio.sleep(1.0)


async def evicted(client: Client) -> None:
    """A prompt comes again after others have taken its blocks."""
    prompt = client.words(3_000)
    await client.send("x", prompt, tokens=1)
    for _ in range(8):
        await client.send("x", client.words(3_000), tokens=1)
    await client.send("v", prompt)


async def salted(client: Client) -> None:
    """A cached prompt comes again with another salt."""
    prompt = client.words(3_000)
    for _ in range(2):
        await client.send("x", prompt, tokens=1)
    await client.send("v", prompt, cache_salt=f"salt {client.rng.random()}")


async def salted_behind(client: Client) -> None:
    """A cached prompt comes with another salt, behind a long prompt at each worker."""
    prompt = client.words(3_000)
    for _ in range(2):
        await client.send("x", prompt, tokens=1)
    ahead = [asyncio.create_task(client.send("x", client.words(LONG), tokens=1)) for _ in range(2)]
    await asyncio.sleep(PAUSE_S)
    await client.send("v", prompt, cache_salt=f"salt {client.rng.random()}")
    await asyncio.gather(*ahead)


async def slow_client(client: Client) -> None:
    """A client does not read for a while. The answer is long, so that buffers fill."""
    await client.send("v", client.words(SHORT), tokens=4_000, read_after_s=3.0, stream=True)


async def plane_away(client: Client) -> None:
    """The server of the request plane dies, and comes back after a second."""
    assert client.service is not None
    await asyncio.to_thread(client.service.kill)
    burst = asyncio.create_task(client.burst("v", 10))
    await asyncio.sleep(1.0)
    await asyncio.to_thread(client.service.start)
    await burst
    await asyncio.sleep(2.0)


async def stale_index(client: Client) -> None:
    """A prompt comes again after others took its blocks, of which no event tells the router."""
    assert client.service is not None
    prompt = client.words(3_000)
    await client.send("x", prompt, tokens=1)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(client.service.signal, signal.SIGSTOP)
    for _ in range(8):
        await client.send("x", client.words(3_000), tokens=1)
    await client.send("v", prompt)
    await asyncio.to_thread(client.service.signal, signal.SIGCONT)


async def slow_tier(client: Client) -> None:
    """The object store stands still while a prompt's blocks are loaded from it."""
    assert client.service is not None
    prompt = client.words(3_000)
    for _ in range(2):  # blocks that are used again are worth a place in the store
        await client.send("x", prompt, tokens=1)
    for _ in range(8):
        await client.send("x", client.words(3_000), tokens=1)
    await asyncio.sleep(2.0)  # blocks go to the store in the background
    await asyncio.to_thread(client.service.signal, signal.SIGSTOP)
    again = asyncio.create_task(client.send("v", prompt))
    await asyncio.sleep(0.8)
    await asyncio.to_thread(client.service.signal, signal.SIGCONT)
    await again


class Scenario(NamedTuple):
    """How causes are injected, their names, flags of the deployment, and the server that it needs.
    The verdict must name one cause first, and two among the first two."""

    inject: Callable[[Client], Awaitable[None]]
    causes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    service: Callable[[], ServerProcess] | None = None


SLOW_PROMPTS = ("--timing", "constant:0.5,5")
"""A prompt is loaded from the store, since computing it takes longer."""
TCP_REQUESTS = ("--request-plane", "tcp://127.0.0.1:0")
"""With NATS for events alone."""


SCENARIOS = {
    "long_prompt": Scenario(long_prompt, ("long prompt ahead",)),
    "overload": Scenario(overload, ("overload",), ("--max-num-seqs", "8")),
    "frozen": Scenario(frozen, ("frozen worker",)),
    "killed": Scenario(killed, ("lost worker",)),
    "stalled": Scenario(stalled, ("stalled loop",)),
    "evicted": Scenario(evicted, ("eviction",), ("--num-blocks", "500")),
    "salted": Scenario(salted, ("wrong salt",)),
    "plane_away": Scenario(plane_away, ("plane away",), (), NatsProcess),
    "stale_index": Scenario(
        stale_index, ("stale index",), ("--num-blocks", "500", *TCP_REQUESTS), NatsProcess
    ),
    "slow_tier": Scenario(
        slow_tier,
        ("slow tier",),
        (*SLOW_PROMPTS, "--num-blocks", "500", "--kv-remote-url", "s3://kv-blocks/blame"),
        S3Process,
    ),
    "slow_client": Scenario(slow_client, ("slow client",), ("--timing", "constant:0.1,0.2")),
    "salted_behind": Scenario(salted_behind, ("long prompt ahead", "wrong salt")),
}


def verdicts(server: Server) -> dict[str, tuple[list[str], str]]:
    """Return the causes and the verdict by the client's request id."""
    observer = ready(deployment_of(server), "observer")[0]
    named: dict[str, tuple[list[str], str]] = {}
    for query in ("?limit=5000", "?limit=5000&failed=1"):
        with urllib.request.urlopen(f"{observer.address}/requests{query}", timeout=30) as answer:
            for story in json.load(answer)["requests"]:
                causes = [cause["name"] for cause in story["causes"]]
                named[story["client_id"]] = causes, story["verdict"]
    return named


async def send_steadily(client: Client) -> None:
    """Send healthy requests, one after the other."""
    while True:
        await asyncio.sleep(0.05)
        await client.burst("h", 1)


async def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Inject one cause until enough requests were slowed by it."""
    scenario = SCENARIOS[name]
    with contextlib.ExitStack() as stack:
        service = None if scenario.service is None else scenario.service()
        if service is not None:
            stack.enter_context(service)
            os.environ.update(environ_of(service))
        return await run_scenario(name, args, service)


def environ_of(service: ServerProcess) -> dict[str, str]:
    """Return the variables by which a deployment finds a server."""
    if isinstance(service, NatsProcess):
        return {"DYNAMO_NATS_URL": service.url}
    return service.environ if isinstance(service, S3Process) else {}


async def run_scenario(
    name: str, args: argparse.Namespace, service: ServerProcess | None
) -> dict[str, Any]:
    """Start a deployment, inject a cause, and count the verdicts."""
    scenario = SCENARIOS[name]
    flags = scenario.flags if "--timing" in scenario.flags else (*TIMING, *scenario.flags)
    server = start_ours(args.model, 2, 1.0, "kv", *flags)
    client = Client(server, service)
    client.calls["x"] = []
    try:
        for _ in range(HEALTHY // 2):
            await client.burst("h", 2)
        usual = median(call.seconds for call in client.calls["h"])
        until, slowed, others = time.monotonic() + args.limit, list[Call](), list[Call]()
        background = asyncio.create_task(send_steadily(client))
        while len(slowed) < args.requests and time.monotonic() < until:
            await scenario.inject(client)
            await asyncio.sleep(0.6)
            calls = [*client.calls["h"], *client.calls["v"]]
            hit = client.calls["v"] if client.calls["x"] else calls
            slowed = [call for call in hit if call.seconds > usual + SLOWED_S]
            others = [call for call in calls if call.seconds <= usual + SLOWED_S]
        background.cancel()
        await asyncio.sleep(2.5)  # the stories come once a second
        judged = verdicts(server)
    finally:
        server.stop()
    count = len(scenario.causes)
    named = {request: tuple(sorted(causes[:count])) for request, (causes, _) in judged.items()}
    for call in slowed[:20] if args.show else ():
        print(f"  {named.get(call.name)}: {judged.get(call.name, ('', 'no story'))[1]}")
    causes = Counter(named.get(call.name, ("no story",)) for call in slowed)
    blamed = [named[call.name] for call in others if call.name in named]
    wanted = tuple(sorted(scenario.causes))
    return {
        "slowed": len(slowed),
        "named": causes[wanted] / max(1, len(slowed)),
        "causes": {", ".join(names): each for names, each in causes.most_common()},
        "others": len(blamed),
        "others_blamed": blamed.count(wanted) / max(1, len(blamed)),
        "others_causes": {", ".join(names): each for names, each in Counter(blamed).most_common()},
    }


def main() -> None:
    """Print a line for each cause, and check the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--causes", default=",".join(SCENARIOS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each cause")
    parser.add_argument("--show", action="store_true", help="print verdicts of slowed requests")
    args = parser.parse_args()
    targets, results = Targets(), dict[str, Any]()
    for name in args.causes.split(","):
        result = results[name] = asyncio.run(run(name, args))
        print(name, json.dumps(result), flush=True)
        targets.at_least(f"{name}: named first", result["named"], 0.95)
        targets.at_most(f"{name}: others blamed", result["others_blamed"], 0.02)
    targets.print_report(results, "dynamo why")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
