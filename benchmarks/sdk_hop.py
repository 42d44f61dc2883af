#!/usr/bin/env python3
"""Measure the CPU of a call between two services over TCP, summed over both processes.

    benchmarks/sdk_hop.py [--calls N] [--items N] [--rounds N]

A dict of about 200 bytes goes there and back, one call after the other; then such dicts are streamed.
Prints medians of the rounds. If grpc is installed, grpc.aio with the same bytes is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import uvloop

from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.runtime import DistributedRuntime
from dynamo.sdk import dynamo_endpoint, service
from dynamo.sdk.handle import connect_service
from dynamo.sdk.serving import start_service

BODY = {
    "id": "req-0123456789abcdef",
    "model": "a-model-of-some-name",
    "text": "x" * 96,
    "temperature": 0.7,
    "tokens": [1, 2, 3, 4, 5, 6, 7, 8],
    "stream": False,
}
UNARY_BAR_US = 120.0
ITEM_BAR_US = 8.0

Once = Callable[[], Awaitable[Any]]
Stream = Callable[[int], AsyncIterator[Any]]


@service(dynamo={"namespace": "bench"})
class EchoService:
    """The remote service."""

    @dynamo_endpoint()
    async def echo(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    @dynamo_endpoint()
    async def items(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        for _ in range(request["count"]):
            yield BODY

    @dynamo_endpoint()
    async def cpu(self) -> float:
        return time.process_time()


def settings_at(place: str) -> Settings:
    return Settings(runtime=RuntimeSettings(discovery=f"file:{place}"))


async def serve(place: str) -> None:
    async with await DistributedRuntime.create(settings_at(place), role="hop") as runtime:
        await start_service(EchoService, runtime)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def unary(cpu: Once, once: Once, calls: int) -> float:
    remote, local = await cpu(), time.process_time()
    for _ in range(calls):
        await once()
    return (time.process_time() - local + await cpu() - remote) / calls * 1e6


async def streamed(cpu: Once, stream: Stream, items: int) -> float:
    remote, local = await cpu(), time.process_time()
    got = 0
    async for _ in stream(items):
        got += 1
    assert got == items
    return (time.process_time() - local + await cpu() - remote) / items * 1e6


async def measure(place: str, args: argparse.Namespace) -> tuple[float, float]:
    async with await DistributedRuntime.create(settings_at(place), role="caller") as runtime:
        hop: Any = await connect_service(EchoService, runtime)
        return await rounds(
            hop.cpu, lambda: hop.echo(BODY), lambda n: hop.items({"count": n}), args
        )


async def rounds(
    cpu: Once, once: Once, stream: Stream, args: argparse.Namespace
) -> tuple[float, float]:
    await unary(cpu, once, args.calls // 10)
    hops = [await unary(cpu, once, args.calls) for _ in range(args.rounds)]
    items = [await streamed(cpu, stream, args.items) for _ in range(args.rounds)]
    return median(hops), median(items)


def show(what: str, times: tuple[float, float], bars: tuple[str, str] = ("", "")) -> None:
    hop, item = times
    print(f"{what:<10} unary {hop:7.1f} us{bars[0]}   stream item {item:6.2f} us{bars[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--grpc", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve and args.grpc:
        asyncio.run(grpc_hop().serve(args.serve, BODY))
        return
    if args.serve:
        uvloop.run(serve(args.serve))
        return
    with far_end() as place:
        times = uvloop.run(measure(place, args))
    show("dynamo.sdk", times, (f" (bar {UNARY_BAR_US:g})", f" (bar {ITEM_BAR_US:g})"))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"remote process's peak memory {peak} MiB")
    if importlib.util.find_spec("grpc"):
        with far_end("--grpc") as place:
            hop = grpc_hop().with_calls(place, BODY, lambda *calls: rounds(*calls, args))
            show("grpc.aio", asyncio.run(hop))


def grpc_hop() -> Any:
    """Return the module that measures grpc.aio; needs grpc."""
    return importlib.import_module("sdk_hop_grpc")


@contextmanager
def far_end(*words: str) -> Iterator[str]:
    """Run the serving process and yield the folder that both processes use."""
    with tempfile.TemporaryDirectory() as place:
        far = [sys.executable, __file__, "--serve", place, *words]
        with subprocess.Popen(far, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            try:
                yield place
            finally:
                process.stdin.close()


if __name__ == "__main__":
    main()
