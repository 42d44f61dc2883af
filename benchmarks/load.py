#!/usr/bin/env python3
"""Generate load on an OpenAI-compatible server, closed loop or Poisson; measure latency and server CPU.

    benchmarks/load.py --url http://127.0.0.1:8000 --model smol --vocabulary MODEL_DIR \
        -c 256 --isl 128 --osl 64 --duration 8 --pid frontend=PID[,PID] --out result.json

- TTFT: from writing the request to the first event with text.
- ITL: between events of one stream.
- E2E: from writing the request to the last byte.
- CPU: user and system time of the named processes during the measurement, per token and per request.

Prompts are distinct. Each has `--isl` words from the model's vocabulary that are one token each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import random
import re
import resource
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import httptools
import uvloop

now = time.perf_counter


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads, counted in nanoseconds, not ticks."""
    spent = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            spent += int(stat.read_text().split()[0])
    return spent / 1e9


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def vocabulary(folder: str) -> list[str]:
    """Return the lower-case words that are one token after a space in the tokenizer of `folder`, or
    of the default model."""
    path = Path(folder) / "tokenizer.json" if folder else default_tokenizer()
    data = json.loads(path.read_text())
    return sorted(w[1:] for w in data["model"]["vocab"] if re.fullmatch("Ġ[a-z]{4,}", w))


def default_tokenizer() -> Path:
    """Return the default model's tokenizer, downloading it if necessary."""
    from dynamo.models.resolve import resolve_model_blocking

    return Path(resolve_model_blocking("").build_card().tokenizer.path)


def percentiles(values: list[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    pick = lambda q: ordered[max(0, math.ceil(len(ordered) * q) - 1)] * 1e3  # noqa: E731
    mean = sum(ordered) / len(ordered) * 1e3
    named = {"mean": mean, "p50": pick(0.5), "p90": pick(0.9), "p99": pick(0.99), "max": pick(1)}
    return {k: round(v, 3) for k, v in named.items()}


class Stream(asyncio.Protocol):
    """A connection for one request at a time."""

    def __init__(self, itl: list[float]) -> None:
        self.itl, self.closed, self.done = itl, False, None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def start(self, wire: bytes) -> asyncio.Future[None]:
        """Send a request. The future is done at the end of its answer."""
        self.parser, self.tail = httptools.HttpResponseParser(self), b""
        self.events, self.first, self.last, self.usage, self.error = 0, None, None, None, None
        self.began, self.done = now(), asyncio.get_running_loop().create_future()
        self.transport.write(wire)
        return self.done

    def on_body(self, body: bytes) -> None:
        if self.parser.get_status_code() != 200:
            self.error = body[:300].decode(errors="replace")
            return
        data = self.tail + body
        cut = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        data, self.tail = data[:cut] or data, data[cut:] if cut else b""
        count = data.count(b'"content":"') - data.count(b'"content":""')
        if count:
            t = now()
            if self.first is None:
                self.first = t
                count_gaps = count - 1
            else:
                self.itl.append(t - self.last)
                count_gaps = count - 1
            self.itl.extend([0.0] * count_gaps)
            self.last, self.events = t, self.events + count
        if b'"usage":{' in data:
            line = next(x for x in data.split(b"\n") if b'"usage":{' in x)
            self.usage = json.loads(line.removeprefix(b"data: "))["usage"]
        if b'data: {"error"' in data:
            self.error = data[:300].decode(errors="replace")

    def on_message_complete(self) -> None:
        self.ended = now()
        if not self.parser.should_keep_alive():
            self.closed = True
            self.transport.close()
        if self.done and not self.done.done():
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, _exc: Exception | None) -> None:
        self.closed = True
        if self.done and not self.done.done():
            self.error, self.ended = "connection lost", now()
            self.done.set_result(None)


class Load:
    """A run with its connections, prompts and measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rng = args, random.Random(args.seed)
        self.words = vocabulary(args.vocabulary)
        url = urllib.parse.urlparse(args.url)
        self.host, self.port = url.hostname, url.port or 80
        self.free: list[Stream] = []
        self.itl: list[float] = []
        self.records: list[Stream] = []
        self.ok: list[tuple[float, float, float, int, dict[str, Any]]] = []
        self.errors: dict[str, int] = {}
        self.talk: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        """Return a new user message, or with `--turns` the conversation with one more turn."""
        args = self.args
        fresh = {"role": "user", "content": " ".join(self.rng.choices(self.words, k=args.isl))}
        if not args.turns:
            return [fresh]
        if not self.talk:
            self.talk.append(fresh)
        elif args.one_message:
            more = " ".join(self.rng.choices(self.words, k=2 * args.turns))
            self.talk[0] = {"role": "user", "content": f"{self.talk[0]['content']} {more}"}
        else:
            answer = " ".join(self.rng.choices(self.words, k=args.turns))
            question = " ".join(self.rng.choices(self.words, k=args.turns))
            self.talk += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": question},
            ]
        return self.talk

    def wire(self) -> bytes:
        """Return the bytes of a request."""
        args = self.args
        body = {
            "model": args.model,
            "messages": self.messages(),
            "max_tokens": args.osl,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **json.loads(args.extra),
        }
        path = "/v1/chat/completions"
        if args.responses:
            path = "/v1/responses"
            text = body["messages"][-1]["content"]
            body = {"model": args.model, "input": text, "max_output_tokens": args.osl}
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        return (
            head + f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode() + data

    async def send(self) -> None:
        """Send a request on an idle or a new connection."""
        while self.free and self.free[-1].closed:
            self.free.pop()
        if self.free:
            stream = self.free.pop()
        else:
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(lambda: Stream(self.itl), self.host, self.port)
        await stream.start(self.wire())
        if stream.first is None:  # an answer of special tokens only has no text
            stream.first = stream.last = stream.ended
        if stream.error or not stream.usage:
            text = stream.error or "no usage"
            self.errors[text] = self.errors.get(text, 0) + 1
        else:
            began, first = stream.began, stream.first
            self.ok.append(
                (
                    first - began,
                    stream.ended - began,
                    stream.last - first,
                    stream.events,
                    stream.usage,
                )
            )
        if not stream.closed:
            self.free.append(stream)

    async def closed(self, until: float, budget: list[int]) -> None:
        """Run one slot of the closed loop."""
        while now() < until and budget[0] > 0:
            budget[0] -= 1
            await self.send()

    async def poisson(self, until: float) -> None:
        """Run an open loop at `--rate` requests per second."""
        when = now()
        async with asyncio.TaskGroup() as group:
            while (when := when + self.rng.expovariate(self.args.rate)) < until:
                await asyncio.sleep(max(0, when - now()))
                group.create_task(self.send())

    async def run(self) -> dict[str, Any]:
        """Warm up, measure and return the report."""
        args = self.args
        pids = {k: [int(p) for p in v.split(",")] for k, v in (x.split("=") for x in args.pid)}
        for _ in range(args.warmup):
            await self.send()
        self.ok.clear(), self.itl.clear()
        gc.freeze(), gc.disable()
        before = {k: sum(map(cpu_seconds, v)) for k, v in pids.items()}
        mine, began = resource.getrusage(resource.RUSAGE_SELF), now()
        until = began + args.duration if not args.requests else math.inf
        if args.rate:
            await self.poisson(until)
        else:
            budget = [args.requests or sys.maxsize]
            async with asyncio.TaskGroup() as group:
                for _ in range(args.c):
                    group.create_task(self.closed(until, budget))
        took = now() - began
        used = resource.getrusage(resource.RUSAGE_SELF)
        own = used.ru_utime + used.ru_stime - mine.ru_utime - mine.ru_stime
        cpu = {k: sum(map(cpu_seconds, v)) - before[k] for k, v in pids.items()}
        return self.report(took, own, cpu, {k: sum(map(rss_mb, v)) for k, v in pids.items()})

    def report(
        self, took: float, own: float, cpu: dict[str, float], rss: dict[str, float]
    ) -> dict[str, Any]:
        """Return the metrics of the run."""
        requests = len(self.ok)
        tokens = sum(x[4].get("completion_tokens") or x[4].get("output_tokens", 0) for x in self.ok)
        prompt = sum(x[4].get("prompt_tokens", 0) for x in self.ok)
        cached = sum(
            (x[4].get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for x in self.ok
        )
        events = sum(x[3] for x in self.ok)
        tpot = [x[2] / (x[3] - 1) for x in self.ok if x[3] > 1]
        return {
            "args": vars(self.args), "seconds": round(took, 3), "requests": requests, "errors": self.errors,
            "tokens": tokens, "tokens_per_s": round(tokens / took, 1), "requests_per_s": round(requests / took, 2),
            "events_per_token": round(events / tokens, 4) if tokens else None,
            "cache_hit_rate": round(cached / prompt, 4) if prompt else None,
            "ttft_ms": percentiles([x[0] for x in self.ok]), "itl_ms": percentiles(self.itl),
            "tpot_ms": percentiles(tpot), "e2e_ms": percentiles([x[1] for x in self.ok]),
            "processes": {
                k: {"cpu_s": round(v, 3), "us_per_token": round(v / max(1, tokens) * 1e6, 2),
                    "us_per_request": round(v / max(1, requests) * 1e6, 1), "rss_mb": round(rss[k], 1)}
                for k, v in cpu.items()
            },
            "generator_cpu_s": round(own, 3),
        }  # fmt: skip


def main() -> None:
    """Parse the arguments, run the load and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--vocabulary", default="", help="folder with tokenizer.json; default: the default model's"
    )
    parser.add_argument("-c", type=int, default=1, help="requests in flight (closed loop)")
    parser.add_argument("--rate", type=float, default=0, help="requests a second (Poisson) instead")
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument(
        "--turns", type=int, default=0, help="one growing conversation, so many words a message"
    )
    parser.add_argument(
        "--one-message",
        action="store_true",
        help="the conversation grows inside one message, as traces do",
    )
    parser.add_argument(
        "--responses", action="store_true", help="whole answers of /v1/responses, which stores them"
    )
    parser.add_argument("--osl", type=int, default=64)
    parser.add_argument("--duration", type=float, default=8)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--extra", default="{}", help="JSON merged into every body")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID[,PID]")
    parser.add_argument("--out")
    args = parser.parse_args()
    result = uvloop.run(Load(args).run())
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1))
    result.pop("args")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
